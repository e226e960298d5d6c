"""How the queries and keys of one part of a pattern are laid out as a batch of small dense attentions, tiles.

    queries (B, H, T, D) -> (N, B H, C, D),    keys (B, H, T, D) -> (N, B H, S, D),    mask (N or 1, 1, C, S)

N tiles of C queries that see S keys, the same number for all. What is laid out beside the sequence is 0, and masked.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.ops.sparse_attention.patterns import Band, Block, Columns, First, Part, Pattern

UNSEEN = -1e30  # what is added to a masked score: infinite to exp, yet no arithmetic with it gives NaN
_QUERIES = 64  # fewest of a tile, where there are so many: products of smaller matrices are slow
_ROWS = 1024  # queries that see the same columns at once: those after them are skipped


class Tiles(ABC):
    """The layout of one part for a sequence of T tokens, or for some of its queries."""

    part: Part
    causal = False
    """Whether query c of a tile sees keys 0 to c and no others: then there is no mask."""

    @abstractmethod
    def rows(self, T: int) -> slice:
        """The queries that these tiles have."""

    @abstractmethod
    def n_scores(self, T: int) -> int:
        """Scores that are computed for a head."""

    @abstractmethod
    def queries(self, x: Tensor) -> Tensor:
        """(B, H, rows, D) -> (N, B H, C, D)."""

    @abstractmethod
    def natural(self, y: Tensor, B: int, n: int) -> Tensor:
        """Back: (N, B H, C, D) -> (B, H, n, D)."""

    @abstractmethod
    def keys(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> (N, B H, S, D)."""


@lru_cache(maxsize=64)  # made of integers T x S, it takes as long as a small attention, and every layer wants the same
def tile_mask(tiles: Tiles, T: int, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores: 0 where the part sees the key, else UNSEEN; (N or 1, 1, C, S)."""
    if tiles.causal:
        return None
    with torch.inference_mode(False):
        t = torch.arange(1, T + 1, dtype=torch.int32).view(1, 1, T, 1)  # 0 is what is not in the sequence
        i = tiles.queries(t[:, :, tiles.rows(T)]) - 1  # (N, 1, C, 1)
        j = tiles.keys(t).mT - 1  # (N, 1, 1, S)
        return torch.zeros((), dtype=dtype).where((j >= 0) & tiles.part.sees(i, j), UNSEEN)


@dataclass(frozen=True)
class Blocks(Tiles):
    """Every `step`-th token is a sequence of its own; blocks of C of its queries see them and the keys around."""

    part: Part
    step: int
    C: int
    before: int
    """Keys before a block that it sees too."""
    after: int
    causal: bool

    def rows(self, T: int) -> slice:
        """All."""
        return slice(0, T)

    def n_scores(self, T: int) -> int:
        """Those of all blocks, of which the last may be cut."""
        n_queries = -(-T // self.step)  # of a sequence
        return self.step * -(-n_queries // self.C) * self.C * (self.before + self.C + self.after)

    def queries(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> (step N, B H, C, D)."""
        x = self._residues(x)
        x = pad(x, (0, 0, 0, -x.shape[3] % self.C)).unflatten(3, (-1, self.C))  # (B, H, step, N, C, D)
        return x.permute(2, 3, 0, 1, 4, 5).flatten(2, 3).flatten(0, 1)

    def natural(self, y: Tensor, B: int, n: int) -> Tensor:
        """(step N, B H, C, D) -> (B, H, n, D)."""
        y = y.unflatten(1, (B, -1)).unflatten(0, (self.step, -1))  # (step, N, B, H, C, D)
        return y.permute(2, 3, 1, 4, 0, 5).flatten(2, 4)[:, :, :n]

    def keys(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> (step N, B H, before + C + after, D)."""
        x = self._residues(x)
        x = pad(x, (0, 0, self.before, self.after + -x.shape[3] % self.C))
        x = x.unfold(3, self.before + self.C + self.after, self.C)  # (B, H, step, N, D, S)
        return x.permute(2, 3, 0, 1, 5, 4).flatten(2, 3).flatten(0, 1)

    def _residues(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, H, step, ceil(T / step), D): token t is the (t // step)-th of sequence t mod step."""
        return pad(x, (0, 0, 0, -x.shape[2] % self.step)).unflatten(2, (-1, self.step)).transpose(2, 3)


@dataclass(frozen=True)
class Selected(Tiles):
    """Queries begin .. end - 1 in one tile, with the last `width` keys of every `size` before `end`."""

    part: Part
    begin: int
    end: int
    size: int
    width: int

    def rows(self, T: int) -> slice:
        """Those of the tile."""
        return slice(self.begin, self.end)

    def n_scores(self, T: int) -> int:
        """Those of the tile."""
        return (self.end - self.begin) * -(-self.end // self.size) * self.width

    def queries(self, x: Tensor) -> Tensor:
        """(B, H, rows, D) -> (1, B H, rows, D)."""
        return x.flatten(0, 1).unsqueeze(0)

    def natural(self, y: Tensor, B: int, n: int) -> Tensor:
        """(1, B H, n, D) -> (B, H, n, D)."""
        return y.squeeze(0).unflatten(0, (B, -1))

    def keys(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> (1, B H, S, D)."""
        x = x[:, :, : self.end]
        x = pad(x, (0, 0, 0, -x.shape[2] % self.size)).unflatten(2, (-1, self.size))[:, :, :, -self.width :]
        return x.flatten(2, 3).flatten(0, 1).unsqueeze(0)


@lru_cache(maxsize=64)
def tiles_of(pattern: Pattern, T: int) -> tuple[Tiles, ...]:
    """The tiles of all parts of a pattern: every key that a query sees is in one of them, and in one only."""
    return tuple(tiles for part in pattern for tiles in _tiles(part, T))


def _tiles(part: Part, T: int) -> list[Tiles]:
    match part:
        case Band():
            return [_band(part, T)]
        case Block():
            return [Blocks(part, 1, min(part.size, T), 0, 0, causal=True)]
        case First():  # of a sequence cut to its first tokens, the last of the only block are all
            count = min(part.count, T)
            return [_FirstKeys(part, 0, T, count, count)]
        case Columns() if part.size > T:  # a block that is not whole, with what it has of the columns
            width = T - (part.size - part.width)
            return [Selected(part, 0, T, T, width)] if width > 0 and part.own_block else []
        case Columns():
            # Whole blocks, such that their queries see the same columns but for those of their own block.
            edges = [*range(0, T, -(-_ROWS // part.size) * part.size), T]
            return [Selected(part, begin, end, part.size, part.width) for begin, end in pairwise(edges)]


@dataclass(frozen=True)
class _FirstKeys(Selected):
    """The same with the first `size` keys."""

    def keys(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> (1, B H, size, D)."""
        return x[:, :, : self.size].flatten(0, 1).unsqueeze(0)

    def n_scores(self, T: int) -> int:
        """Those of the tile."""
        return (self.end - self.begin) * self.size


def _band(part: Band, T: int) -> Blocks:
    """Blocks of a quarter of what a query sees: of the keys laid out, four in five are then seen."""
    step = min(part.step, T)  # with more, every token would be alone all the same
    M = -(-T // step)
    before, after = M - 1 if part.last is None else min(part.last, M - 1), min(max(-part.first, 0), M - 1)
    if before == M - 1:  # back to the beginning: one block
        causal = part.first == 0 and part.start == 0
        return Blocks(part, step, M, 0, 0, causal)
    C = min(M, max(_QUERIES, (before + after) // 4))
    return Blocks(part, step, C, before, after, causal=False)
