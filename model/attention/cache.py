"""Keys and values of earlier tokens, for mechanisms that attend to all or some of them.

A cache is a value. It is a view into a buffer with room behind it, where the next tokens are
written, so a decoding step usually copies only the new token. The buffer records how far it has
been written: continuing the same cache a second time makes a copy, and no tokens are overwritten.

All rows of a batch end in the last column, which holds each row's latest token, no matter how many
tokens came before. So all rows are written in the same place. A row with fewer tokens than columns
has zeros in front, which are masked.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model.attention.base import AttentionInputs
from model.ops.sparse_attention.attend import dense_attention, document_attention
from model.ops.sparse_attention.patterns import CAUSAL, Pattern, needed_keys, reach_of
from model.position import last_positions

_SMALLEST_ROOM = 64  # columns of a new buffer
# Tokens: dropping columns copies the rest, which costs about as much as attending to them.
_PRUNE_EVERY = 64


class KVCache(NamedTuple):
    """Keys and values of all tokens so far."""

    k: Tensor
    """(B, H, S, D); row b's tokens are its last lengths[b] columns."""
    v: Tensor
    """(B, H, S, E)."""
    lengths: tuple[int, ...]
    """Tokens seen, for each row."""
    buffer: "_Buffer | None" = None
    """What keys and values are views of, with room for the next tokens; not part of the value."""

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> "KVCache":
        """Return the cache after the first tokens: keys (B, H, T, D) and values (B, H, T, E)."""
        empty = cls(k[:, :, :0], v[:, :, :0], (0,) * len(k))
        return empty.append(k, v)[0]

    def append(self, k: Tensor, v: Tensor) -> tuple["KVCache", Tensor, Tensor, Tensor | None]:
        """Add T tokens with keys (B, H, T, D) and values (B, H, T, E).

        Returns:
            The new cache; its keys (B, H, S + T, D) and values; and a bool mask (B or 1, 1, T, S +
            T) of the keys that the T new tokens may attend to, or None if these are all.
        """
        T = k.shape[2]
        lengths = tuple(n + T for n in self.lengths)
        # Columns in front may belong to longer texts whose rows were removed.
        columns = slice(self.k.shape[2] - max(self.lengths), None)
        k_all, v_all, buffer = _extend(
            self.k[:, :, columns], self.v[:, :, columns], self.buffer, k, v
        )
        after = KVCache(k_all, v_all, lengths, buffer)
        S = k_all.shape[2]
        if T == 1 and min(lengths) == S:
            return after, k_all, v_all, None
        key = last_positions(lengths, S, k.device).unsqueeze(1)  # (B or 1, 1, S)
        query = last_positions(lengths, T, k.device).unsqueeze(2)  # (B or 1, T, 1)
        mask = (key >= 0) & (key <= query)
        return after, k_all, v_all, mask.unsqueeze(1)


def attend_to_all(
    inputs: AttentionInputs,
    cache: KVCache | None,
    return_state: bool,
    scale: float | None = None,
) -> tuple[Tensor, KVCache | None]:
    """Softmax attention from T tokens to themselves and to the earlier tokens in `cache`.

    Values without features stand for the keys. There is no cache if documents start.

    Returns:
        The result, and the cache after the T tokens, if it is wanted or if there was one.
    """
    q, k, v, _, positions = inputs
    starts = positions.document_starts
    after = None
    mask = None
    if cache is not None:
        after, k, v, mask = cache.append(k, v)
    elif return_state:
        after = KVCache.of(k, v)
    if v.shape[3] == 0:
        v = k
    if starts is not None:
        return document_attention(q, k, v, [CAUSAL], starts, scale), after
    return dense_attention(q, k, v, mask, scale, is_causal=cache is None), after


class SparseCache(NamedTuple):
    """Keys and values that later tokens can still attend to by the patterns of their heads.

    For patterns of limited reach, such as windows, these are the last columns. For others, columns
    that no later token can attend to are dropped every 64 tokens.
    """

    k: Tensor
    """(B, H, S, D)."""
    v: Tensor
    """(B, H, S, E)."""
    place: Tensor
    """(B, 1, S), int32: each column's token in its text, counted from 1; 0: no token."""
    lengths: tuple[int, ...]
    """Tokens seen, for each row, including dropped ones."""
    buffer: "_Buffer | None" = None
    """What keys and values are views of, with room for the next tokens; not part of the value."""

    @classmethod
    def of(cls, k: Tensor, v: Tensor, patterns: Sequence[Pattern]) -> "SparseCache":
        """Return the cache after the first tokens: keys (B, H, T, D) and values (B, H, T, E)."""
        place = torch.empty(len(k), 1, 0, dtype=torch.int32, device=k.device)
        empty = cls(k[:, :, :0], v[:, :, :0], place, (0,) * len(k))
        return empty.append(k, v, patterns)[0]._pruned(patterns)

    @classmethod
    def empty(
        cls,
        B: int,
        H: int,
        D: int,
        patterns: Sequence[Pattern],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "SparseCache":
        """Return the cache before the first token, with all columns that patterns of limited reach
        ever need."""
        S = reach_of(patterns) or 0
        k = torch.zeros(B, H, S, D, dtype=dtype, device=device)
        place = torch.zeros(B, 1, S, dtype=torch.int32, device=device)
        return cls(k, k.clone(), place, (0,) * B)

    def append(
        self, k: Tensor, v: Tensor, patterns: Sequence[Pattern]
    ) -> tuple["SparseCache", Tensor, Tensor, Tensor]:
        """Add T tokens with keys (B, H, T, D) and values (B, H, T, E).

        Returns:
            The new cache; keys (B, H, S, D) and values that include all that the T tokens may
            attend to; the positions of these columns in their texts, (B, S), negative for columns
            without a token.
        """
        T = k.shape[2]
        lengths = tuple(n + T for n in self.lengths)
        new = last_positions(lengths, T, k.device).expand(len(k), T).to(torch.int32)
        place = torch.cat([self.place, 1 + new.unsqueeze(1)], dim=2)
        # A buffer for more tokens could be far larger than the columns that are kept.
        in_place = T <= _PRUNE_EVERY
        k_all, v_all, buffer = _extend(
            self.k.to(k.dtype), self.v.to(v.dtype), self.buffer, k, v, in_place
        )
        after = SparseCache(k_all, v_all, place, lengths, buffer)
        is_due = max(lengths) // _PRUNE_EVERY > max(self.lengths) // _PRUNE_EVERY
        if is_due or reach_of(patterns) is not None:
            after = after._pruned(patterns)
        return after, k_all, v_all, place.squeeze(1) - 1

    def forget(self, is_old: Tensor) -> "SparseCache":
        """Remove tokens of earlier documents: the last columns of `is_old`, bool (B, S or more)."""
        is_old = is_old[:, is_old.shape[1] - self.place.shape[2] :].unsqueeze(1)
        return self._replace(place=self.place.masked_fill(is_old, 0))

    def _pruned(self, patterns: Sequence[Pattern]) -> "SparseCache":
        """Drop columns that no later token can attend to; a view if the last columns remain."""
        # Windows: the last columns remain, as a view.
        S = self.k.shape[2]
        reach = reach_of(patterns)
        if reach is not None:
            last = slice(S - min(S, reach), None)
            k = self.k[:, :, last]
            v = self.v[:, :, last]
            if self.buffer is None and reach < S:  # a view would keep all columns in memory
                k = k.clone()
                v = v.clone()
            return SparseCache(k, v, self.place[:, :, last], self.lengths, self.buffer)
        # Others: copy the columns that some row needs.
        place = self.place.squeeze(1)  # (B, S)
        n_seen = torch.tensor(self.lengths, device=place.device).unsqueeze(1)
        is_needed = (place > 0) & needed_keys(patterns, place - 1, n_seen)
        n_needed = int(is_needed.sum(1).max())
        if n_needed == S:
            return self
        order = is_needed.int().argsort(stable=True, dim=1)  # needed columns are last, in order
        columns = order[:, S - n_needed :]
        k = self.k.take_along_dim(columns[:, None, :, None], dim=2)
        v = self.v.take_along_dim(columns[:, None, :, None], dim=2)
        return SparseCache(k, v, place.gather(1, columns).unsqueeze(1), self.lengths)


class _Buffer:
    """Memory for keys and values that several caches are views into."""

    def __init__(self, k: Tensor, v: Tensor, columns: int) -> None:
        """Copy k (B, H, S, D) and v (B, H, S, E) into new memory of `columns` columns."""
        self.k = k.new_empty(*k.shape[:2], columns, k.shape[3])
        self.v = v.new_empty(*v.shape[:2], columns, v.shape[3])
        self.written = 0  # columns that belong to some cache
        self.write(k, v)

    def write(self, k: Tensor, v: Tensor) -> None:
        """Append columns."""
        columns = slice(self.written, self.written + k.shape[2])
        self.k[:, :, columns] = k
        self.v[:, :, columns] = v
        self.written = columns.stop

    def can_extend(self, k: Tensor, T: int) -> bool:
        """Whether T columns fit behind the view k, none are written there yet, and torch allows
        writing them."""
        if k.untyped_storage().data_ptr() != self.k.untyped_storage().data_ptr():
            return False
        if self.k.is_inference() and not torch.is_inference_mode_enabled():
            return False
        end = k.storage_offset() // k.stride(2) + k.shape[2]
        return end == self.written and end + T <= self.k.shape[2]


def _extend(
    k_before: Tensor,
    v_before: Tensor,
    buffer: _Buffer | None,
    k: Tensor,
    v: Tensor,
    in_place: bool = True,
) -> tuple[Tensor, Tensor, _Buffer | None]:
    """Append T columns to S: keys (B, H, S + T, D), values (B, H, S + T, E), and the buffer that
    they are in."""
    if torch.is_grad_enabled() or not in_place:  # a backward pass may need the earlier contents
        return torch.cat([k_before, k], dim=2), torch.cat([v_before, v], dim=2), None
    n = k_before.shape[2] + k.shape[2]
    if buffer is None or not buffer.can_extend(k_before, k.shape[2]):
        room = max(_SMALLEST_ROOM, 2 * n)  # doubling copies each token once or twice
        buffer = _Buffer(k_before, v_before, room)
    buffer.write(k, v)
    columns = slice(buffer.written - n, buffer.written)
    return buffer.k[:, :, columns], buffer.v[:, :, columns], buffer
