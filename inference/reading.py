"""Reading long texts piece by piece, with progress; and the check that a text fits into memory."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from common.console import Track
from common.memory import available_memory
from common.settings import UserError
from data.tokenizer import Tokenizer
from inference.engine import PIECE, Texts, read
from model.gpt import GPT
from model.state import state_bytes, stretched

_LONG = 64 * PIECE  # tokens: reading fewer is fast
_COPIES = 3  # a cache that grows is copied into a buffer of twice its size: see model/attention/cache.py


class Reading(NamedTuple):
    """A text of which a part is read.

    If that part is a multiple of PIECE tokens, at which all prompts are cut, continuing gives the same bits as
    reading it in one go.
    """

    texts: Texts | None = None
    """The text after `n_read` tokens; None: nothing is read."""
    n_read: int = 0
    rest: tuple[int, ...] = ()
    """The tokens after these."""

    def read_on(self, gpt: GPT, tokenizer: Tokenizer) -> "Reading":
        """Read whole pieces of the rest."""
        whole = self.rest[: len(self.rest) // PIECE * PIECE]
        texts = read_pieces(gpt, tokenizer, whole, self.texts)
        return Reading(texts, self.n_read + len(whole), self.rest[len(whole) :])


def read_pieces(gpt: GPT, tokenizer: Tokenizer, ids: Sequence[int], texts: Texts | None) -> Texts | None:
    """Read more tokens of a text; the progress of a long one is shown."""
    track = Track("reading: tokens", len(ids)) if len(ids) >= _LONG else None
    with track or contextlib.nullcontext():
        for start in range(0, len(ids), PIECE):
            piece = torch.tensor([ids[start : start + PIECE]])
            texts, _ = read(gpt, piece, tokenizer.n_vocab, texts, tokenizer.eot_id)
            if track:
                track.advance(piece.shape[1])
    return texts


class TextMemory:
    """The memory that texts of a model take."""

    def __init__(self, gpt: GPT, tokenizer: Tokenizer) -> None:
        self._gpt = gpt
        texts, _ = read(gpt, torch.tensor([[tokenizer.eot_id]]), tokenizer.n_vocab)
        self._state: Any = tree_map_only(torch.Tensor, torch.Tensor.cpu, texts.state)
        self._least = state_bytes(self._state)

    def check(self, n_tokens: int) -> None:
        """Raise UserError if keys and values of so many tokens do not fit into the memory that is left now."""
        needed = state_bytes(stretched(self._gpt, self._state, n_tokens))
        if needed > self._least and _COPIES * needed > (room := _free(self._gpt.embed.weight.device)):
            raise UserError(
                f"a text of {n_tokens:,} tokens does not fit into memory: its keys and values are {needed:,} bytes, "
                f"{_COPIES} times as many while they grow, and {room:,} bytes are available: shorten it, or use a "
                "model with a state of one size, such as log_space"
            )


def _free(device: torch.device) -> int:
    """Bytes that may still be allocated on a device."""
    if device.type == "cpu":
        return available_memory()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
