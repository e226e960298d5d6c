"""Keys and values of earlier tokens, for every mechanism that looks back at them: all of them, or some.

A cache is a value. It is a view into a buffer with room behind it, where the next tokens are written: a step copies
nothing but itself, but for those at which columns are dropped. The buffer knows how far it is written, so that whoever
continues the same cache a second time gets a copy, and nobody's tokens are overwritten.

The rows of a batch end together, in the last column: that is each row's latest token, however many tokens came before.
So all rows are written in the same place, and a row with fewer tokens than columns has zeros in front that none sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model.ops.sparse_attention import Pattern, needed_keys, reach_of

_SMALLEST_ROOM = 64  # columns of a new buffer
_PRUNED_EVERY = 64  # tokens: dropping columns copies the others, and in between they are read this many times


class KVCache(NamedTuple):
    """Keys and values of all tokens so far."""

    k: Tensor
    """(B, H, S, D); row b's tokens are its last lengths[b] columns."""
    v: Tensor
    """(B, H, S, E)."""
    lengths: tuple[int, ...]
    """Tokens seen, for each row."""
    room: "Room | None" = None
    """Where to write what follows; no part of the value."""

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> "KVCache":
        """The cache after the first tokens of all rows: keys (B, H, T, D) and values (B, H, T, E)."""
        return cls(k[:, :, :0], v[:, :, :0], (0,) * len(k))._after(k, v)

    def append(self, k: Tensor, v: Tensor) -> tuple["KVCache", Tensor, Tensor, Tensor | None]:
        """The cache after T more tokens, with keys (B, H, T, D) and values (B, H, T, E).

        Returns:
            The cache; keys (B, H, S + T, D) and values of all tokens; which of them the T new ones may attend to, bool
            (B or 1, 1, T, S + T), or None where that is all of them.
        """
        after, T = self._after(k, v), k.shape[2]
        S = after.k.shape[2]
        if T == 1 and min(after.lengths) == S:
            return after, after.k, after.v, None
        key = positions(after.lengths, S, k.device).unsqueeze(1)  # (B or 1, 1, S)
        query = positions(after.lengths, T, k.device).unsqueeze(2)  # (B or 1, T, 1)
        return after, after.k, after.v, ((key >= 0) & (key <= query)).unsqueeze(1)

    def _after(self, k: Tensor, v: Tensor) -> "KVCache":
        unused = self.k.shape[2] - max(self.lengths)  # columns of longer texts, whose rows were taken out
        k_all, v_all, room = _extend(self.k[:, :, unused:], self.v[:, :, unused:], self.room, k, v)
        return KVCache(k_all, v_all, tuple(n + k.shape[2] for n in self.lengths), room)


class SparseCache(NamedTuple):
    """Keys and values that later tokens may still see by the patterns of their heads.

    Where these reach back so far and no further, as windows do, that many columns. Else what nobody will see is dropped
    every 64 tokens.
    """

    k: Tensor
    """(B, H, S, D)."""
    v: Tensor
    """(B, H, S, E)."""
    place: Tensor
    """(B, 1, S), int32: which token of its text a column has, counted from 1; 0: none."""
    lengths: tuple[int, ...]
    """Tokens seen, for each row, also those that are dropped."""
    room: "Room | None" = None
    """Where to write what follows; no part of the value."""

    @classmethod
    def of(cls, k: Tensor, v: Tensor, patterns: Sequence[Pattern]) -> "SparseCache":
        """The cache after the first tokens of all rows: keys (B, H, T, D) and values (B, H, T, E)."""
        place = torch.empty(len(k), 1, 0, dtype=torch.int32, device=k.device)
        empty = cls(k[:, :, :0], v[:, :, :0], place, (0,) * len(k))
        return empty.append(k, v, patterns)[0]._pruned(patterns)

    def append(self, k: Tensor, v: Tensor, patterns: Sequence[Pattern]) -> tuple["SparseCache", Tensor, Tensor, Tensor]:
        """The cache after T more tokens, with keys (B, H, T, D) and values (B, H, T, E).

        Returns:
            The cache; keys (B, H, S, D) and values, all that some of the T tokens may see among them; the positions of
            these columns in their texts, (B, S), negative where there is nothing.
        """
        T, lengths = k.shape[2], tuple(n + k.shape[2] for n in self.lengths)
        new = positions(lengths, T, k.device).expand(len(k), T).to(torch.int32)
        place = torch.cat([self.place, 1 + new.unsqueeze(1)], dim=2)
        in_place = T <= _PRUNED_EVERY  # a buffer for more might be far larger than what is remembered of them
        k_all, v_all, room = _extend(self.k, self.v, self.room, k, v, in_place)
        after = SparseCache(k_all, v_all, place, lengths, room)
        due = max(lengths) // _PRUNED_EVERY > max(self.lengths) // _PRUNED_EVERY
        if due or reach_of(patterns) is not None:
            after = after._pruned(patterns)
        return after, k_all, v_all, place.squeeze(1) - 1

    def _pruned(self, patterns: Sequence[Pattern]) -> "SparseCache":
        """Without columns that no later token sees: where that is all but the last, a view of these."""
        S, reach = self.k.shape[2], reach_of(patterns)
        if reach is not None:
            k, v, last = (x[:, :, S - min(S, reach) :] for x in (self.k, self.v, self.place))
            if self.room is None and reach < S:  # a view would keep all the others alive
                k, v = k.clone(), v.clone()
            return SparseCache(k, v, last, self.lengths, self.room)
        place = self.place.squeeze(1)  # (B, S)
        n_seen = torch.tensor(self.lengths, device=place.device).unsqueeze(1)
        needed = (place > 0) & needed_keys(patterns, place - 1, n_seen)
        n = int(needed.sum(1).max())
        if n == S:
            return self
        columns = needed.int().argsort(stable=True, dim=1)[:, S - n :]  # (B, n): a row's in order, at the end
        k, v = (x.take_along_dim(columns[:, None, :, None], dim=2) for x in (self.k, self.v))
        return SparseCache(k, v, place.gather(1, columns).unsqueeze(1), self.lengths)


def positions(lengths: tuple[int, ...], n: int, device: torch.device | None = None) -> Tensor:
    """Positions in the text of the last n tokens of these many, (B, n), or (1, n) if all rows' are the same.

    Negative: before the first token, where there is nothing.
    """
    lengths = lengths[:1] if len(set(lengths)) == 1 else lengths
    return torch.tensor(lengths, device=device).unsqueeze(1) - n + torch.arange(n, device=device)


class _Buffer:
    """Memory of keys and values that several caches are views into."""

    def __init__(self, k: Tensor, v: Tensor, columns: int) -> None:
        """A copy of k (B, H, S, D) and v (B, H, S, E), and room for more up to this many columns."""
        S = k.shape[2]
        self.k = k.new_empty(*k.shape[:2], columns, k.shape[3])
        self.v = v.new_empty(*v.shape[:2], columns, v.shape[3])
        self.k[:, :, :S], self.v[:, :, :S] = k, v
        self.written = S  # columns that belong to some cache


@dataclass(frozen=True, eq=False)
class Room:
    """The columns after a cache's own."""

    buffer: _Buffer
    end: int
    """The column after the cache's last."""

    def holds(self, T: int) -> bool:
        """Whether T more can be written here: nobody else has, there are as many, and torch lets us."""
        mine = self.end == self.buffer.written
        foreign = self.buffer.k.is_inference() and not torch.is_inference_mode_enabled()
        return mine and not foreign and self.end + T <= self.buffer.k.shape[2]

    def write(self, k: Tensor, v: Tensor) -> "Room":
        """Write T columns; what is then left."""
        end = self.end + k.shape[2]
        self.buffer.k[:, :, self.end : end], self.buffer.v[:, :, self.end : end] = k, v
        self.buffer.written = end
        return Room(self.buffer, end)


def _extend(
    k_before: Tensor, v_before: Tensor, room: Room | None, k: Tensor, v: Tensor, in_place: bool = True
) -> tuple[Tensor, Tensor, Room | None]:
    """S columns and then T more: keys (B, H, S + T, D), values (B, H, S + T, E), and the room after them."""
    if torch.is_grad_enabled() or not in_place:  # a backward pass may need what it has seen
        return torch.cat([k_before, k], dim=2), torch.cat([v_before, v], dim=2), None
    n = k_before.shape[2] + k.shape[2]
    if room is None or not room.holds(k.shape[2]):
        buffer = _Buffer(k_before, v_before, max(_SMALLEST_ROOM, 2 * n))  # doubled: each token is copied once or twice
        room = Room(buffer, buffer.written)
    room = room.write(k, v)
    columns = slice(room.end - n, room.end)
    return room.buffer.k[:, :, columns], room.buffer.v[:, :, columns], room
