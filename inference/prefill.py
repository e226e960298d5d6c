"""A request to continue a text, and the reading of its prompt, `chunk_size` tokens at a time."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.console import Track
from data.tokenizer import Tokenizer
from inference.sampling import SamplingConfig
from model.gpt import GPT, GPTState

CHUNK = 256
"""Tokens of a prompt that go through the model at once on a CPU."""
_OF_GPUS = 2048  # fewer leave most multiprocessors idle

_LONG = 64 * CHUNK  # tokens: the progress of reading fewer is not shown


class Prefix(NamedTuple):
    """The state after B texts, one per row, with all that is needed to continue them.

    It is a value, like a state. `cat_states` and `select_rows` (model/state.py) join batches of
    texts of any lengths, and take rows out of one.
    """

    logits: Tensor
    """Logits of the next token, (B, n_vocab)."""
    seen: Tensor
    """Tokens that occur in the text, except those that end texts, bool (B, n_vocab)."""
    state: GPTState


@dataclass(frozen=True)
class Request:
    """A text to continue."""

    ids: tuple[int, ...]
    """The tokens to read first. In training, every text follows <|endoftext|>."""
    max_tokens: int = 0
    """Most tokens to draw; 0 only reads the prompt."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end the continuation; they are not included in it."""
    n_top: int | None = None
    """Report log-probabilities: each token's and this many likeliest ones'; None: none."""
    echo: bool = False
    """Whether to report the prompt too."""
    prompt_start: int = 0
    """Where the prompt begins in `ids`: 1 after an <|endoftext|> that is not part of it."""
    before: Prefix | None = None
    """The text that `ids` continue, one row; None: they begin one."""
    n_before: int = 0
    """Tokens of that text."""

    @property
    def n_prompt(self) -> int:
        """Tokens before the continuation, <|endoftext|> included."""
        return self.n_before + len(self.ids)

    @property
    def n_read(self) -> int:
        """Tokens that the model reads in all. It does not read the last one."""
        return self.n_prompt + max(self.max_tokens - 1, 0)


@torch.inference_mode()
def read(
    gpt: GPT,
    token_ids: Tensor,
    n_vocab: int,
    before: Prefix | None = None,
    end_ids: Sequence[int] = (-1,),
    step: Callable[..., Any] | None = None,
) -> tuple[Prefix, Tensor]:
    """Read (B, T) more tokens of B texts.

    Return the new prefix, and the logits after each token, (B, T, n_vocab).

    Args:
        n_vocab: ids from here on, the padding of the embedding, are never drawn.
        before: the prefix that these tokens continue; None: the texts start here.
        end_ids: the tokens that end texts; -1: the last, n_vocab - 1.
        step: called instead of the model; its next call may overwrite the returned state.
    """
    token_ids = token_ids.to(gpt.device)
    state = None if before is None else before.state
    logits, state = (step or gpt)(token_ids, state, return_state=True)
    logits = logits[..., :n_vocab]
    last = logits[:, -1].clone()  # a view would keep the logits of all tokens
    seen = before.seen.clone() if before else torch.zeros_like(last, dtype=torch.bool)
    seen.scatter_(1, token_ids, True)
    for end_id in end_ids:
        seen[:, end_id] = False
    return Prefix(last, seen, state), logits


def chunk_size(gpt: GPT) -> int:
    """Return how many tokens of a prompt go through the model at once.

    This bounds memory, and the time that other texts wait in the server. All prompts are cut at its
    multiples, so stopping at a multiple and continuing later does not change the bits.
    """
    return CHUNK if gpt.device.type == "cpu" else _OF_GPUS


def prefill(gpt: GPT, tokenizer: Tokenizer, request: Request, to_end: bool = False) -> Request:
    """Read the whole chunks of a request's prompt, or all of it with `to_end`.

    Return the request that is left. The progress of a long prompt is shown.
    """
    size = chunk_size(gpt)
    n = len(request.ids) if to_end else len(request.ids) // size * size
    before = request.before
    track = Track("reading: tokens", n) if n >= _LONG else None
    with track or contextlib.nullcontext():
        for start in range(0, n, size):
            chunk = torch.tensor([request.ids[start : min(start + size, n)]])
            before, _ = read(gpt, chunk, tokenizer.n_vocab, before, tokenizer.end_ids)
            if track:
                track.advance(chunk.shape[1])
    return replace(request, ids=request.ids[n:], before=before, n_before=request.n_before + n)
