"""Patterns: which keys a query attends to.

A pattern is a union of disjoint parts. Each part is regular enough that reshaping selects its keys: bands in one
residue class, blocks, and columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.ops.documents import document_mask, document_positions


class _Part:
    """A regular set of keys for every query.

    sees(i, j), its definition: whether query i may attend to key j, in the broadcast shape of the two.
    needed(j, n): whether query n or a later one may attend to an earlier key j.
    """

    def reach(self) -> int | None:
        """Largest distance from a query back to a key that it may attend to; None: unlimited."""
        return None


@dataclass(frozen=True)
class Band(_Part):
    """Keys j = i - step n for first <= n <= last, where first is not negative."""

    step: int
    first: int
    last: int | None
    """None: back to the beginning."""
    start: int = 0
    """Keys before this position belong to another part."""

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        seen = ((i - j) % self.step == 0) & (i - j >= self.step * self.first) & (j >= self.start)
        return seen if self.last is None else seen & (i - j <= self.step * self.last)

    def reach(self) -> int | None:
        return None if self.last is None else self.step * self.last

    def needed(self, j: Tensor, n: Tensor) -> Tensor:
        return (j >= self.start) & (self.last is None or j >= n - self.step * self.last)


@dataclass(frozen=True)
class Block(_Part):
    """Keys j <= i in the query's own block of `size` tokens."""

    size: int

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i // self.size == j // self.size)

    def reach(self) -> int | None:
        return self.size - 1

    def needed(self, j: Tensor, n: Tensor) -> Tensor:
        return j // self.size == n // self.size


@dataclass(frozen=True)
class Columns(_Part):
    """Keys j <= i among the last `width` tokens of every block of `size` tokens."""

    size: int
    width: int
    own_block: bool
    """Whether the query's own block is included."""

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        near = j <= i if self.own_block else j // self.size < i // self.size
        return near & self.needed(j, i)

    def needed(self, j: Tensor, n: Tensor) -> Tensor:
        return j % self.size >= self.size - self.width


@dataclass(frozen=True)
class First(_Part):
    """Keys j <= i among the first `count`."""

    count: int

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j < self.count)

    def needed(self, j: Tensor, n: Tensor) -> Tensor:
        return j < self.count


Part = Band | Block | Columns | First
Pattern = tuple[Part, ...]


CAUSAL: Pattern = (Band(1, 0, None),)


def window(size: int, dilation: int = 0) -> Pattern:
    """Sliding windows, with `dilation` keys skipped between two (Beltagy et al. 2020, arXiv 2004.05150, section 3.1).

    (i - j) mod (dilation + 1) = 0 and 0 <= i - j < size (dilation + 1): `size` keys, including the query's own.
    """
    return (Band(dilation + 1, 0, size - 1),)


def longformer(size: int, n_global: int) -> Pattern:
    """A causal window and the first `n_global` keys (Beltagy et al. 2020, section 3.1)."""
    return Band(1, 0, size - 1, start=n_global), First(n_global)


def strided(stride: int, which: str = "both") -> Pattern:
    """Child et al. 2019 (arXiv 1904.10509), section 4.3: A1 = {max(0, i - l) .. i}, A2 = {j <= i : (i - j) mod l = 0}.

    `which`: "A1", "A2", or "both" for their union, in which only A1 contains the keys at distances 0 and l.
    """
    first = 2 if which == "both" and stride > 1 else 0
    parts: dict[str, Part] = {"A1": Band(1, 0, stride), "A2": Band(stride, first, None)}
    if which == "both" and stride == 1:  # A2 is all there is
        return (parts["A2"],)
    return tuple(parts.values()) if which == "both" else (parts[which],)


def fixed(size: int, width: int, which: str = "both") -> Pattern:
    """Child et al. 2019, section 4.3: A1 = {j <= i : floor(j / l) = floor(i / l)}, A2 = {j <= i : j mod l >= l - c}.

    `which`: "A1", "A2", or "both" for their union. In A2 alone, the first l - c queries have no keys.
    """
    parts: dict[str, Part] = {
        "A1": Block(size),
        "A2": Columns(size, width, own_block=which == "A2"),
    }
    return tuple(parts.values()) if which == "both" else (parts[which],)


def is_causal(pattern: Pattern, T: int) -> bool:
    """Whether, for T tokens, the pattern is full causal attention."""
    for part in pattern:  # parts are disjoint: if one has all keys, the others are empty
        match part:
            case Block(size) if size >= T:
                return True
            case Band(1, 0, last, 0) if last is None or last >= T - 1:
                return True
    return False


def pattern_mask(patterns: Sequence[Pattern], i: Tensor, j: Tensor) -> Tensor:
    """True where query i (..., T) may attend to key j (..., S), by the pattern of each head: (..., 1 or H, T, S)."""
    kinds = list(dict.fromkeys(patterns))
    seen = torch.stack(
        [pattern_sees(pattern, i.unsqueeze(-1), j.unsqueeze(-2)) for pattern in kinds], dim=-3
    )
    of_head = [kinds.index(pattern) for pattern in patterns]
    return seen if len(kinds) == 1 or of_head == [*range(len(kinds))] else seen[..., of_head, :, :]


def document_pattern_mask(patterns: Sequence[Pattern], starts: Tensor) -> Tensor:
    """`pattern_mask` by positions in documents, given their starts (B, T): (B, 1 or H, T, T)."""
    if {*patterns} == {CAUSAL}:
        return document_mask(starts)
    t = document_positions(starts)
    return pattern_mask(patterns, t, t) & document_mask(starts)


def is_by_distance(pattern: Pattern) -> bool:
    """Whether the pattern depends on distances alone, so that it is the same wherever a document starts."""
    return all(isinstance(part, Band) and part.start == 0 for part in pattern)


def needed_keys(patterns: Sequence[Pattern], j: Tensor, n: Tensor) -> Tensor:
    """True where query n or a later one may attend to the earlier key j in some head; n and j broadcast."""
    needed = [part.needed(j, n) for pattern in patterns for part in pattern]
    return torch.stack(torch.broadcast_tensors(*needed)).any(0)


def reach_of(patterns: Sequence[Pattern]) -> int | None:
    """Largest distance from a query back to a key that some head may attend to; None: unlimited."""
    reaches = [part.reach() for pattern in patterns for part in pattern]
    return None if None in reaches else max(reach for reach in reaches if reach is not None)


def pattern_sees(pattern: Pattern, i: Tensor, j: Tensor) -> Tensor:
    """Whether query i may attend to key j, in the broadcast shape of the two."""
    seen = pattern[0].sees(i, j)
    for part in pattern[1:]:
        seen = seen | part.sees(i, j)
    return seen
