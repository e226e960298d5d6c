"""A request to continue a text, and the reading of its tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inference.sampling import SamplingConfig
from model.gpt import GPT, GPTState

CHUNK = 256
"""Tokens of a prompt that go through the model at once on a CPU."""
_CHUNK_ON_GPU = 2048  # fewer leave most multiprocessors idle


class Prefix(NamedTuple):
    """The state after B texts, one per row, with all that is needed to continue them.

    It is a value, like a state. `cat_states` and `select_rows` (model/state.py) join batches of
    texts of any lengths, and take rows out of one.
    """

    logits: Tensor
    """Logits of the next token, (B, n_vocab)."""
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


@torch.inference_mode()
def read(
    gpt: GPT,
    token_ids: Tensor,
    n_vocab: int,
    before: Prefix | None = None,
    step: Callable[..., Any] | None = None,
) -> tuple[Prefix, Tensor]:
    """Read (B, T) more tokens of B texts.

    Return the new prefix, and the logits after each token, (B, T, n_vocab).

    Args:
        n_vocab: ids from here on, the padding of the embedding, are never drawn.
        before: the prefix that these tokens continue; None: the texts start here.
        step: called instead of the model; its next call may overwrite the returned state.
    """
    state = None if before is None else before.state
    logits, state = (step or gpt)(token_ids.to(gpt.device), state, return_state=True)
    logits = logits[..., :n_vocab]
    last = logits[:, -1].clone()  # a view would keep the logits of all tokens
    return Prefix(last, state), logits


def chunk_size(gpt: GPT) -> int:
    """Return how many tokens of a prompt go through the model at once.

    This bounds memory, and the time that other texts wait in the server. All prompts are cut at its
    multiples, so a prompt read from a cached prefix gives the same bits as one read in one go.
    """
    return CHUNK if gpt.device.type == "cpu" else _CHUNK_ON_GPU
