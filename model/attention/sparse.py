"""Sparse softmax attention: sliding windows (Beltagy et al. 2020), strided and fixed patterns
(Child et al. 2019)."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import pad

from model.attention.base import (
    AttentionInputs,
    MultiHeadAttention,
    SharedHeadSettings,
    Traits,
)
from model.attention.cache import SparseCache
from model.ops.custom import disable
from model.ops.sparse_attention.attend import dense_attention, document_attention, sparse_attention
from model.ops.sparse_attention.patterns import (
    Pattern,
    fixed,
    is_by_distance,
    pattern_mask,
    strided,
    window,
)
from model.position import last_positions

LARGEST = 2**20
_Keys = Annotated[int, Field(ge=1, le=LARGEST)]
_Gap = Annotated[int, Field(ge=1, le=2**16)]
_SAMPLES = 256  # queries whose keys are counted to estimate the operations


class SlidingWindowConfig(SharedHeadSettings, defaults="model/attention/sliding_window"):
    """The last `window` keys, the query's own included; with dilation, every (dilation + 1)-th."""

    name: Literal["sliding_window"]
    traits: ClassVar[Traits] = Traits(state="fixed")
    window: _Keys | tuple[_Keys, ...]
    """Keys that a query attends to; a list gives one number for each head."""
    dilation: _Gap | tuple[_Gap | None, ...] | None
    """Keys skipped between two keys of the window; null: none; a list has an item for each head."""

    def mismatch(self, n_head: int, head_dim: int) -> str | None:
        for name, value in (("window", self.window), ("dilation", self.dilation)):
            if isinstance(value, tuple) and len(value) != n_head:
                wanted = "give one for each head, or one number"
                return f"{name} lists {len(value)} for n_head={n_head}: {wanted}"
        return super().mismatch(n_head, head_dim)

    def mechanism(self, n_embd: int, n_head: int, head_dim: int) -> "SparseAttention":
        windows = _for_each_head(self.window, n_head)
        dilations = _for_each_head(self.dilation, n_head)
        patterns = []
        for size, gap in zip(windows, dilations, strict=True):
            patterns.append(window(size, gap or 0))
        return SparseAttention(n_embd, n_head, head_dim, self.n_kv_head, patterns)


def _for_each_head(value: Any, n_head: int) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,) * n_head


class _TwoSetsConfig(SharedHeadSettings):
    """Attention to two sets of keys, A1 and A2."""

    merge: bool
    """true: every head attends to A1 and A2; false: even heads attend to A1, odd heads to A2."""

    def pattern(self, which: str) -> Pattern:
        """Return the keys in "A1", "A2" or "both"."""
        raise NotImplementedError

    def mismatch(self, n_head: int, head_dim: int) -> str | None:
        if n_head == 1 and not self.merge:
            return "n_head=1 leaves no head for A2: set merge=true, or use more heads"
        return super().mismatch(n_head, head_dim)

    def mechanism(self, n_embd: int, n_head: int, head_dim: int) -> "SparseAttention":
        if self.merge:
            patterns = [self.pattern("both")]
        else:
            patterns = [self.pattern("A1"), self.pattern("A2")]
        return SparseAttention(n_embd, n_head, head_dim, self.n_kv_head, patterns)


class StridedConfig(_TwoSetsConfig, defaults="model/attention/strided"):
    """Child et al. 2019: A1 = the query's own key and the last `stride` before, A2 = every
    stride-th key before."""

    name: Literal["strided"]
    stride: int = Field(ge=1, le=LARGEST)
    """l, usually near the square root of the sequence length."""

    def pattern(self, which: str) -> Pattern:
        return strided(self.stride, which)


class FixedConfig(_TwoSetsConfig, defaults="model/attention/fixed"):
    """Child et al. 2019: A1 = the query's interval of `size` tokens, A2 = the last `width` tokens
    of every interval.

    In heads that attend to A2 alone, the first l - c tokens have no keys, and their result is 0.
    """

    name: Literal["fixed"]
    size: int = Field(ge=1, le=LARGEST)
    """l, tokens of an interval."""
    width: int = Field(ge=1)
    """c, tokens of an interval that later tokens attend to: 1 to l. The paper uses 8, 16 and 32."""

    @model_validator(mode="after")
    def _width_fits(self) -> "FixedConfig":
        if self.width > self.size:
            raise ValueError(
                f"width={self.width} is more than an interval has: use 1 to size={self.size}"
            )
        return self

    def pattern(self, which: str) -> Pattern:
        return fixed(self.size, self.width, which)


class SparseAttention(MultiHeadAttention):
    """Causal attention in which each head attends to the keys of a pattern.

    The state is a cache of the keys that later tokens can still attend to in some head. For A1
    these are a window or an interval. For fixed attention's A2 they are c of every l earlier
    tokens, and for strided attention's A2 all tokens, because each of the next l tokens attends to
    others.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        head_dim: int,
        n_kv_head: int | None,
        patterns: Sequence[Pattern],
    ) -> None:
        """Heads take turns with `patterns`."""
        super().__init__(n_embd, n_head, head_dim, n_kv_head)
        self.patterns = [patterns[h % len(patterns)] for h in range(n_head)]
        self.restarts = all(map(is_by_distance, patterns))

    def attend(
        self, inputs: AttentionInputs, state: Any, return_state: bool
    ) -> tuple[Tensor, SparseCache | None]:
        q, k, v, _, positions = inputs
        starts = positions.document_starts
        if starts is not None and return_state and state is None:
            state = self.initial_state(len(q), q.device)
        if state is not None:
            return self._continue(inputs, state)
        if starts is not None:
            return document_attention(q, k, v, self.patterns, starts), None
        y = sparse_attention(q, k, v, self.patterns)
        after = SparseCache.of(k, v, self.patterns) if return_state else None
        return y, after

    def initial_state(self, B: int, device: torch.device) -> SparseCache:
        dtype = self.qkv.weight.dtype
        return SparseCache.empty(B, self.n_kv_head, self.head_dim, self.patterns, dtype, device)

    @disable  # it counts tokens, which would be compiled again for each count
    def _continue(self, inputs: AttentionInputs, state: SparseCache) -> tuple[Tensor, SparseCache]:
        """Attend from T more tokens to these and the cached ones."""
        q = inputs.q
        starts = inputs.positions.document_starts
        after, k, v, j = state.append(inputs.k, inputs.v, self.patterns)
        i = last_positions(after.lengths, q.shape[2], q.device)  # (B or 1, T)
        mask = pattern_mask(self.patterns, i, j) & (j >= 0)[:, None, None]  # (B, 1 or H, T, S)
        if starts is not None:
            document = starts.cumsum(1)  # (B, T), counted; 0: that of the cached tokens
            key_document = pad(document, (j.shape[1] - document.shape[1], 0))  # (B, S)
            is_same = document.unsqueeze(2) == key_document.unsqueeze(1)  # (B, T, S)
            mask = mask & is_same.unsqueeze(1)
            after = after.forget(key_document != document[:, -1:])
        if q.shape[2] == 1:
            visible = mask.flatten(0, 2).any(0).nonzero().squeeze(1)
            if 0 < 2 * len(visible) < k.shape[2]:  # copying these keys costs less than reading all
                k = k.index_select(2, visible)
                v = v.index_select(2, visible)
                mask = mask.index_select(3, visible)
        return dense_attention(q, k, v, mask), after

    def mask(self, T: int) -> Tensor:
        t = torch.arange(T, device=self.qkv.weight.device)
        return pattern_mask(self.patterns, t, t)

    def flops_per_token(self, seq_len: int) -> int:
        """Scores and their product with the values, for the average number of keys."""
        j = torch.arange(seq_len, device="cpu")
        i = j
        if seq_len > _SAMPLES:
            # Steps of the golden ratio do not coincide with the period of a pattern.
            i = (torch.arange(_SAMPLES, device="cpu") * 0.6180339887 % 1 * seq_len).long()
        mask = pattern_mask(self.patterns, i, j)  # (1 or n_head, queries, seq_len)
        n_keys = float(mask.sum() / (len(mask) * len(i)))
        return round(4 * self.n_head * self.head_dim * n_keys)
