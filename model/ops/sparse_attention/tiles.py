"""How a set of keys in a pattern is computed as a batch of small dense attentions, called tiles.

    queries (B, H, T, D) -> (N, B H, C, D)
    keys (B, H, T, D) -> (N, B H, S, D)
    mask (N or 1, 1, C, S)

There are N tiles of C queries and S keys each. Positions outside of the sequence are filled with 0,
and masked.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from common.numbers import ceil_div
from model.ops.sparse_attention.patterns import Band, Columns, First, Interval, Keys, Pattern

UNSEEN = -1e30  # added to masked scores: exp of it is 0, yet no arithmetic with it gives NaN
# Fewest queries of a tile, unless the sequence is shorter: products of smaller matrices are slow.
_QUERIES = 64
_ROWS = 1024  # queries that share a tile of columns; columns after them are skipped


@dataclass(frozen=True)
class SlidingTiles:
    """Every `step`-th token forms a sequence of its own; tiles of C of its queries see their keys
    and those before."""

    visible: Keys
    step: int
    C: int
    before: int
    """Number of keys before a tile's queries that they also see."""
    causal: bool
    """Whether query c of a tile attends to exactly the keys 0 to c, so that no mask is needed."""

    def rows(self, T: int) -> slice:
        """The queries that these tiles contain."""
        return slice(0, T)

    def n_scores(self, T: int) -> int:
        """Scores computed for a head."""
        n_tiles = ceil_div(ceil_div(T, self.step), self.C)  # of each sequence
        return self.step * n_tiles * self.C * (self.before + self.C)

    def queries(self, x: Tensor) -> Tensor:
        """(B, H, rows, D) -> (N, B H, C, D), where N includes all `step` sequences."""
        x = self._residues(x)
        x = pad(x, (0, 0, 0, -x.shape[3] % self.C))
        x = x.unflatten(3, (-1, self.C))  # (B, H, step, N, C, D)
        return x.permute(2, 3, 0, 1, 4, 5).flatten(2, 3).flatten(0, 1)

    def natural(self, y: Tensor, B: int, n: int) -> Tensor:
        """Undo `queries`: (N, B H, C, D) -> (B, H, n, D)."""
        y = y.unflatten(1, (B, -1)).unflatten(0, (self.step, -1))  # (step, N, B, H, C, D)
        return y.permute(2, 3, 1, 4, 0, 5).flatten(2, 4)[:, :, :n]

    def keys(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> (N, B H, before + C, D)."""
        x = self._residues(x)
        x = pad(x, (0, 0, self.before, -x.shape[3] % self.C))
        x = x.unfold(3, self.before + self.C, self.C)  # (B, H, step, N, D, S)
        return x.permute(2, 3, 0, 1, 5, 4).flatten(2, 3).flatten(0, 1)

    def _residues(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, H, step, ceil(T / step), D): token t is the (t // step)-th of
        sequence t mod step."""
        x = pad(x, (0, 0, 0, -x.shape[2] % self.step))
        return x.unflatten(2, (-1, self.step)).transpose(2, 3)


@dataclass(frozen=True)
class ColumnTile:
    """One tile: queries begin .. end - 1 and, of the keys before `stop`, the last `width` of every
    `size`."""

    visible: Keys
    begin: int
    end: int
    stop: int
    size: int
    width: int
    causal = False

    def rows(self, T: int) -> slice:
        return slice(self.begin, self.end)

    def n_scores(self, T: int) -> int:
        return (self.end - self.begin) * ceil_div(self.stop, self.size) * self.width

    def queries(self, x: Tensor) -> Tensor:
        """(B, H, rows, D) -> (1, B H, rows, D)."""
        return x.flatten(0, 1).unsqueeze(0)

    def natural(self, y: Tensor, B: int, n: int) -> Tensor:
        """(1, B H, n, D) -> (B, H, n, D)."""
        return y.squeeze(0).unflatten(0, (B, -1))

    def keys(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> (1, B H, S, D)."""
        x = x[:, :, : self.stop]
        x = pad(x, (0, 0, 0, -x.shape[2] % self.size)).unflatten(2, (-1, self.size))
        x = x[:, :, :, -self.width :]
        return x.flatten(2, 3).flatten(0, 1).unsqueeze(0)


Tiles = SlidingTiles | ColumnTile


@lru_cache(maxsize=64)  # a mask takes as long as a small attention, and all layers need the same
def tile_mask(tiles: Tiles, T: int, dtype: torch.dtype) -> Tensor | None:
    """What to add to scores of keys of type `dtype`, (N or 1, 1, C, S): 0 where the query may
    attend, else UNSEEN."""
    if tiles.causal:
        return None
    with torch.inference_mode(False):
        t = torch.arange(1, T + 1, dtype=torch.int32).view(1, 1, T, 1)  # 0 stands for padding
        i = tiles.queries(t[:, :, tiles.rows(T)]) - 1  # (N, 1, C, 1)
        j = tiles.keys(t).mT - 1  # (N, 1, 1, S)
        allowed = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32))
        return allowed.where((j >= 0) & tiles.visible.sees(i, j), UNSEEN)


@lru_cache(maxsize=64)
def tiles_of(pattern: Pattern, T: int) -> tuple[Tiles, ...]:
    """Return the tiles of a pattern: each key of a query is in exactly one of them."""
    return tuple(tiles for keys in pattern for tiles in _tiles(keys, T))


def _tiles(keys: Keys, T: int) -> list[Tiles]:
    match keys:
        case Band():
            return [_band(keys, T)]
        case Interval():
            return [SlidingTiles(keys, 1, min(keys.size, T), 0, causal=True)]
        case First():
            count = min(keys.count, T)
            return [ColumnTile(keys, 0, T, count, count, count)]
        case Columns() if keys.size > T:  # one incomplete interval, with the columns that it has
            width = T - (keys.size - keys.width)
            if width <= 0 or not keys.same_interval:
                return []
            return [ColumnTile(keys, 0, T, T, T, width)]
        case Columns():
            # Whole intervals, whose queries attend to the same columns except those of their
            # interval.
            rows = ceil_div(_ROWS, keys.size) * keys.size
            tiles: list[Tiles] = []
            for begin, end in pairwise([*range(0, T, rows), T]):
                tiles.append(ColumnTile(keys, begin, end, end, keys.size, keys.width))
            return tiles


def _band(band: Band, T: int) -> SlidingTiles:
    """Queries of a tile: a quarter of the keys that each attends to, so that 4 of 5 computed scores
    are used."""
    step = min(band.step, T)  # a larger step would still leave every token alone
    length = ceil_div(T, step)
    before = length - 1
    if band.last is not None:
        before = min(band.last, before)
    if before == length - 1:  # back to the beginning: one tile
        causal = band.first == 0 and band.start == 0
        return SlidingTiles(band, step, length, 0, causal)
    C = min(length, max(_QUERIES, before // 4))
    return SlidingTiles(band, step, C, before, causal=False)
