"""Prompts that a model continues together: each gets the text that it would get alone."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch

from data.text_stream import TextStream
from data.tokenizer import Tokenizer
from inference.generate import SamplingConfig, Texts, draw, next_token_probabilities, read
from model.gpt import GPT
from model.state import cat_states, select_rows


class Continuation:
    """A prompt, and the text that grows behind it."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: str, seed: int, max_new_tokens: int, stop: Sequence[str] = ()
    ) -> None:
        """`stop`: texts that end the continuation and are no part of it."""
        self.prompt, self.seed = prompt, seed
        self.prompt_ids = [tokenizer.eot_id, *tokenizer.encode(prompt)]  # in training, texts follow the end of another
        self.text = ""
        """What is certain of the continuation."""
        self.n_tokens = 0
        """Tokens drawn."""
        self.finish_reason: Literal["length", "stop", "end_of_text"] | None = None
        """None: it still grows."""
        self.generator = torch.Generator().manual_seed(seed)
        self._stream = TextStream(tokenizer, stop)
        self._eot_id, self._max_new_tokens = tokenizer.eot_id, max_new_tokens

    def as_dict(self) -> dict[str, Any]:
        """What programs may want to know."""
        return {
            "prompt": self.prompt,
            "text": self.text,
            "seed": self.seed,
            "prompt_tokens": len(self.prompt_ids) - 1,
            "tokens": self.n_tokens,
            "finish_reason": self.finish_reason,
        }

    def push(self, token_id: int) -> None:
        """Add the next token."""
        if token_id == self._eot_id:
            self.finish_reason = "end_of_text"
        else:
            self.n_tokens += 1
            self.text += self._stream.push(token_id)
            if self._stream.stopped:
                self.finish_reason = "stop"
            elif self.n_tokens == self._max_new_tokens:
                self.finish_reason = "length"
        if self.finish_reason:
            self.text += self._stream.end()


def grow(
    gpt: GPT,
    continuations: Iterable[Continuation],
    *,
    n_vocab: int,
    sampling: SamplingConfig,
    at_once: int,
) -> Iterator[None]:
    """Continue all in their order, so many at once: where one ends, the next begins. Yields after each step.

    Args:
        n_vocab: as for `read`.

    Raises:
        UserError: the model's logits are not finite.
    """
    waiting, growing, device = deque(continuations), list[Continuation](), gpt.embed.weight.device
    texts: Texts | None = None
    while waiting or growing:
        joining = [waiting.popleft() for _ in range(min(at_once - len(growing), len(waiting)))]
        if joining:
            prompts = [read(gpt, torch.tensor([one.prompt_ids], device=device), n_vocab) for one in joining]
            texts = cat_states([*([texts] if texts else []), *prompts])
            growing += joining
        assert texts is not None
        probabilities = next_token_probabilities(texts.logits, sampling, texts.seen)
        token_ids = draw(probabilities, [one.generator for one in growing])  # (B,)
        for one, token_id in zip(growing, token_ids.tolist(), strict=True):
            one.push(token_id)
        yield
        rows = [row for row, one in enumerate(growing) if not one.finish_reason]
        if len(rows) < len(growing):
            growing, token_ids = [growing[row] for row in rows], token_ids[rows]
            texts = select_rows(texts, rows) if rows else None
        if texts:
            texts = read(gpt, token_ids.unsqueeze(1).to(device), n_vocab, texts)


def pieces(one: Continuation, steps: Iterator[None]) -> Iterator[str]:
    """The text of one of the continuations that `steps` lets grow, as it comes; the others grow with it."""
    n = 0
    while True:
        yield one.text[n:]
        n = len(one.text)
        if one.finish_reason:
            return
        next(steps)
