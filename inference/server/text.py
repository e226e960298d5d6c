"""One text in the engine: what is asked for, how far it is, and what its reader is told."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from data.text_stream import TextStream
from data.tokenizer import Tokenizer
from inference.generate import SamplingConfig, Texts
from inference.server.tokens import Token, TokenLog

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TextRequest:
    """A text to continue."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    """Longest continuation; 0: only the prompt is read."""
    sampling: SamplingConfig
    seed: int
    stop: tuple[str, ...] = ()
    """Texts that end the continuation and are no part of it."""
    n_top: int | None = None
    """Most likely tokens to tell in each one's place, and how likely it was itself; None: nothing of that."""
    echo: bool = False
    """Whether to tell the prompt too."""


@dataclass(frozen=True)
class Piece:
    """What is new of a text."""

    text: str
    tokens: tuple[Token, ...]
    """Those that begin in `text`; none where n_top is None."""
    n_tokens: int
    """Tokens drawn so far, the one that ended the text among them."""
    finish_reason: FinishReason | None
    """Of the last piece: the text ended, by itself or with a stop string, or max_tokens did."""


Tell = Callable[[Piece | Exception], None]
"""Takes the pieces of a text, or what went wrong. It is called in the engine's thread, and returns at once."""


class Completion:
    """A text that grows: the engine reads its prompt, draws its tokens, and gives them to `accept`."""

    def __init__(self, request: TextRequest, tokenizer: Tokenizer, tell: Tell) -> None:
        self.request = request
        self.ids = read_ids(request.prompt_ids, tokenizer)
        self.n_read = 0
        """How many of `ids` the model has read."""
        self.texts: Texts | None = None
        """After these; the engine's once the prompt is read."""
        self.generator = torch.Generator().manual_seed(request.seed)
        self.cancelled = False
        """Set by whoever waited for it and does no more: it leaves with the engine's next turn."""
        self.finished = False
        self._tokenizer, self._tell = tokenizer, tell
        self._stream = TextStream(tokenizer, request.stop)
        self._log = None if request.n_top is None else TokenLog(tokenizer, request.n_top)
        self._n_tokens = self._n_chars = 0

    def accept_prompt(self, logits: Tensor) -> None:
        """Take note of how likely the prompt was: (T, n_vocab) logits after each of the next T of `ids`."""
        if self._log is None or not self.request.echo:
            return
        if self.n_read == 0 and len(self.ids) == len(self.request.prompt_ids):  # else it is not part of the text
            self._log.add_first(self.ids[0])
        self._log.add(self.ids[self.n_read + 1 : self.n_read + 1 + len(logits)], logits)

    def end_prompt(self) -> None:
        """The prompt is read: tell it where that is wanted. It may be all there is."""
        prompt = self._tokenizer.decode_bytes(self.request.prompt_ids) if self.request.echo else b""
        self._say(prompt.decode(errors="replace"), "length" if self.request.max_tokens == 0 else None)

    def accept(self, token_id: int, logits: Tensor) -> None:
        """Go on with a token, drawn from `logits` (1, n_vocab), and tell what is certain now."""
        self._n_tokens += 1
        if token_id == self._tokenizer.eot_id:
            self._say(self._stream.end(), "stop")
            return
        if self._log is not None:
            self._log.add([token_id], logits)
        text = self._stream.push(token_id)
        if self._stream.stopped:
            self._say(text, "stop")
        elif self._n_tokens == self.request.max_tokens:
            self._say(text + self._stream.end(), "length")
        else:
            self._say(text)

    def fail(self, error: Exception) -> None:
        """End it with an error, if it has not ended."""
        if not self.finished:
            self.finished = True
            self._tell(error)

    def _say(self, text: str, finish_reason: FinishReason | None = None) -> None:
        self.finished = finish_reason is not None
        self._n_chars += len(text)
        if text or self.finished:
            tokens = self._log.take(self._n_chars) if self._log else ()
            self._tell(Piece(text, tokens, self._n_tokens, finish_reason))


def read_ids(prompt_ids: tuple[int, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the model reads of a prompt. In training, every text follows the end of another."""
    begins = prompt_ids[:1] == (tokenizer.eot_id,)
    return prompt_ids if begins else (tokenizer.eot_id, *prompt_ids)
