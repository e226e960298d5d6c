"""Patterns: which keys a query attends to.

A pattern is a union of disjoint sets of keys. Each set is regular enough that reshaping selects its
keys: bands in one residue class, intervals, and columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.ops.document_masks import document_mask, document_positions


class _Keys:
    """A regular set of keys for every query.

    sees(i, j), its definition: whether query i may attend to key j, in the broadcast shape of the
    two. needed(j, n): whether query n or a later one may attend to an earlier key j.
    """

    def reach(self) -> int | None:
        """Largest distance from a query back to a key that it may attend to; None: unlimited."""
        return None


@dataclass(frozen=True)
class Band(_Keys):
    """Keys j = i - step n for first <= n <= last, where first is not negative."""

    step: int
    first: int
    last: int | None
    """None: back to the beginning."""
    start: int = 0
    """Keys before this position belong to another set."""

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        distance = i - j
        visible = (distance % self.step == 0) & (distance >= self.step * self.first)
        if self.last is not None:
            visible = visible & (distance <= self.step * self.last)
        return visible & (j >= self.start)

    def reach(self) -> int | None:
        return None if self.last is None else self.step * self.last

    def needed(self, j: Tensor, n: Tensor) -> Tensor:
        needed = j >= self.start
        if self.last is not None:
            needed = needed & (j >= n - self.step * self.last)
        return needed


@dataclass(frozen=True)
class Interval(_Keys):
    """Keys j <= i in the query's interval of `size` tokens."""

    size: int

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i // self.size == j // self.size)

    def reach(self) -> int | None:
        return self.size - 1

    def needed(self, j: Tensor, n: Tensor) -> Tensor:
        return j // self.size == n // self.size


@dataclass(frozen=True)
class Columns(_Keys):
    """Keys j <= i among the last `width` tokens of every interval of `size` tokens."""

    size: int
    width: int
    same_interval: bool
    """Whether the query's interval is included."""

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        before = j <= i if self.same_interval else j // self.size < i // self.size
        return before & self.needed(j, i)

    def needed(self, j: Tensor, n: Tensor) -> Tensor:
        return j % self.size >= self.size - self.width


@dataclass(frozen=True)
class First(_Keys):
    """Keys j <= i among the first `count`."""

    count: int

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j < self.count)

    def needed(self, j: Tensor, n: Tensor) -> Tensor:
        return j < self.count


Keys = Band | Interval | Columns | First
Pattern = tuple[Keys, ...]


CAUSAL: Pattern = (Band(1, 0, None),)


def window(size: int, dilation: int = 0) -> Pattern:
    """Sliding windows, with `dilation` keys skipped between two (Beltagy et al. 2020, arXiv
    2004.05150, section 3.1).

    (i - j) mod (dilation + 1) = 0 and 0 <= i - j < size (dilation + 1): `size` keys, including the
    query's own.
    """
    return (Band(dilation + 1, 0, size - 1),)


def longformer(size: int, n_global: int) -> Pattern:
    """A causal window and the first `n_global` keys (Beltagy et al. 2020, section 3.1)."""
    return Band(1, 0, size - 1, start=n_global), First(n_global)


def strided(stride: int, which: str = "both") -> Pattern:
    """Child et al. 2019 (arXiv 1904.10509), section 4.3: A1 = {max(0, i - l) .. i}, A2 = {j <= i :
    (i - j) mod l = 0}.

    `which`: "A1", "A2", or "both" for their union, in which only A1 contains the keys at distances
    0 and l.
    """
    A1 = Band(1, 0, stride)
    A2 = Band(stride, 0, None)
    if which == "A1":
        return (A1,)
    if which == "A2" or stride == 1:  # with stride 1, A2 is all there is
        return (A2,)
    return A1, Band(stride, 2, None)


def fixed(size: int, width: int, which: str = "both") -> Pattern:
    """Child et al. 2019, section 4.3: A1 = {j <= i : floor(j / l) = floor(i / l)}, A2 = {j <= i : j
    mod l >= l - c}.

    `which`: "A1", "A2", or "both" for their union. In A2 alone, the first l - c queries have no
    keys.
    """
    if which == "A1":
        return (Interval(size),)
    if which == "A2":
        return (Columns(size, width, same_interval=True),)
    return Interval(size), Columns(size, width, same_interval=False)


def is_causal(pattern: Pattern, T: int) -> bool:
    """Whether, for T tokens, the pattern is full causal attention."""
    for keys in pattern:  # sets are disjoint: if one has all keys, the rest are empty
        match keys:
            case Interval(size) if size >= T:
                return True
            case Band(1, 0, last, 0) if last is None or last >= T - 1:
                return True
    return False


def pattern_mask(patterns: Sequence[Pattern], i: Tensor, j: Tensor) -> Tensor:
    """True where query i (..., T) may attend to key j (..., S), by the pattern of each head: (...,
    1 or H, T, S)."""
    different = list(dict.fromkeys(patterns))
    i = i.unsqueeze(-1)
    j = j.unsqueeze(-2)
    masks = torch.stack([pattern_sees(pattern, i, j) for pattern in different], dim=-3)
    if len(different) in (1, len(patterns)):
        return masks
    return masks[..., [different.index(pattern) for pattern in patterns], :, :]


def document_pattern_mask(patterns: Sequence[Pattern], starts: Tensor) -> Tensor:
    """`pattern_mask` by positions in documents, given their starts (B, T): (B, 1 or H, T, T)."""
    if {*patterns} == {CAUSAL}:
        return document_mask(starts)
    t = document_positions(starts)
    return pattern_mask(patterns, t, t) & document_mask(starts)


def is_by_distance(pattern: Pattern) -> bool:
    """Whether the pattern depends on distances alone, wherever a document starts."""
    return all(isinstance(keys, Band) and keys.start == 0 for keys in pattern)


def needed_keys(patterns: Sequence[Pattern], j: Tensor, n: Tensor) -> Tensor:
    """True where query n or a later one may attend to key j in some head; n and j broadcast."""
    needed = [keys.needed(j, n) for pattern in patterns for keys in pattern]
    return torch.stack(torch.broadcast_tensors(*needed)).any(0)


def reach_of(patterns: Sequence[Pattern]) -> int | None:
    """Largest distance from a query back to a key that some head may attend to; None: unlimited."""
    furthest = 0
    for pattern in patterns:
        for keys in pattern:
            reach = keys.reach()
            if reach is None:
                return None
            furthest = max(furthest, reach)
    return furthest


def pattern_sees(pattern: Pattern, i: Tensor, j: Tensor) -> Tensor:
    """Whether query i may attend to key j, in the broadcast shape of the two."""
    first, *others = pattern
    visible = first.sees(i, j)
    for keys in others:
        visible = visible | keys.sees(i, j)
    return visible
