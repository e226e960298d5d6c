"""Keys and values of earlier tokens, for every mechanism that looks back at them: all of them, or the last few.

A cache is a value. It is a view into a buffer with room behind it, where the next tokens are written: a step copies
nothing but itself. The buffer knows how far it is written, so that whoever continues the same cache a second time gets
a copy, and nobody's tokens are overwritten.

The rows of a batch end together, in the last column: that is each row's latest token, however many tokens came before.
So all rows are written in the same place, and a row with fewer tokens than columns has zeros in front that none sees.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_SMALLEST_ROOM = 64  # columns of a new buffer


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
        return after, after.k, after.v, visible(after.lengths, T, S, k.device)

    def _after(self, k: Tensor, v: Tensor) -> "KVCache":
        unused = self.k.shape[2] - max(self.lengths)  # columns of longer texts, whose rows were taken out
        k_all, v_all, room = _extend(self.k[:, :, unused:], self.v[:, :, unused:], self.room, k, v)
        return KVCache(k_all, v_all, tuple(n + k.shape[2] for n in self.lengths), room)


class RingCache(NamedTuple):
    """Keys and values of the last `window` tokens: the same memory after any number of them."""

    k: Tensor
    """(B, H, window, D); row b's tokens are its last min(window, lengths[b]) columns."""
    v: Tensor
    """(B, H, window, E)."""
    lengths: tuple[int, ...]
    """Tokens seen, for each row, also those that are forgotten."""
    room: "Room | None" = None
    """Where to write what follows; no part of the value."""

    @classmethod
    def empty(cls, k: Tensor, v: Tensor, window: int) -> "RingCache":
        """Before the first token, for keys (B, H, T, D) and values (B, H, T, E)."""
        (B, H, _, D), E = k.shape, v.shape[-1]
        return cls(k.new_zeros(B, H, window, D), v.new_zeros(B, H, window, E), (0,) * B)

    @classmethod
    def of(cls, k: Tensor, v: Tensor, window: int) -> "RingCache":
        """The cache after the first tokens of all rows: keys (B, H, T, D) and values (B, H, T, E)."""
        return cls.empty(k, v, window)._after(k, v)[0]

    def append(self, k: Tensor, v: Tensor) -> tuple["RingCache", Tensor, Tensor, Tensor | None]:
        """The cache after T more tokens, with keys (B, H, T, D) and values (B, H, T, E).

        Returns:
            The cache; keys (B, H, window - 1 + T, D) and values that some of the T new tokens may see; which of them
            each may attend to, itself and the window - 1 tokens before: bool (B or 1, 1, T, window - 1 + T), or None
            where that is all of them. `positions` tells which tokens they are.
        """
        after, k_all, v_all = self._after(k, v)
        T, window = k.shape[2], self.k.shape[2]
        n = window - 1 + T
        k_all, v_all = k_all[:, :, -n:], v_all[:, :, -n:]
        if T == 1 and min(after.lengths) >= window:
            return after, k_all, v_all, None
        return after, k_all, v_all, visible(after.lengths, T, n, k.device, window)

    def _after(self, k: Tensor, v: Tensor) -> tuple["RingCache", Tensor, Tensor]:
        """The cache, and window + T keys and values."""
        T, window = k.shape[2], self.k.shape[2]
        room = self.room
        if window < T:  # a buffer for these would be larger than what is remembered of them
            k_all, v_all, room = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2), None
        else:
            k_all, v_all, room = _extend(self.k, self.v, room, k, v)
        last_k, last_v = k_all[:, :, -window:], v_all[:, :, -window:]
        if room is None:  # a view would keep all the others alive
            last_k, last_v = last_k.clone(), last_v.clone()
        return RingCache(last_k, last_v, tuple(n + T for n in self.lengths), room), k_all, v_all


def positions(lengths: tuple[int, ...], n: int, device: torch.device | None = None) -> Tensor:
    """Positions in the text of the last n columns after these many tokens, (B, n), or (1, n) if all rows' are the same.

    Negative: before the first token, where there is nothing.
    """
    lengths = lengths[:1] if len(set(lengths)) == 1 else lengths
    return torch.tensor(lengths, device=device).unsqueeze(1) - n + torch.arange(n, device=device)


def visible(
    lengths: tuple[int, ...], T: int, S: int, device: torch.device | None = None, window: int | None = None
) -> Tensor:
    """Which of the last S columns each of the last T tokens may attend to, bool (B or 1, 1, T, S).

    Those that hold a token, are not later, and with a window are less than so many tokens before.
    """
    key = positions(lengths, S, device).unsqueeze(1)  # (B, 1, S)
    query = positions(lengths, T, device).unsqueeze(2)  # (B, T, 1)
    mask = (key >= 0) & (key <= query)
    if window is not None:
        mask &= query - key < window
    return mask.unsqueeze(1)


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
    k_before: Tensor, v_before: Tensor, room: Room | None, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Room | None]:
    """S columns and then T more: keys (B, H, S + T, D), values (B, H, S + T, E), and the room after them."""
    if torch.is_grad_enabled():  # a backward pass may need what it has seen: nothing is written in place
        return torch.cat([k_before, k], dim=2), torch.cat([v_before, v], dim=2), None
    n = k_before.shape[2] + k.shape[2]
    if room is None or not room.holds(k.shape[2]):
        buffer = _Buffer(k_before, v_before, max(_SMALLEST_ROOM, 2 * n))  # doubled: each token is copied once or twice
        room = Room(buffer, buffer.written)
    room = room.write(k, v)
    columns = slice(room.end - n, room.end)
    return room.buffer.k[:, :, columns], room.buffer.v[:, :, columns], room
