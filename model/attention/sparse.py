"""Sparse softmax attention: what every pattern of keys has in common, and Child et al.'s strided and fixed patterns."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common.settings import Settings
from model.attention.base import check_kv_heads
from model.attention.cache import SparseCache, positions
from model.attention.softmax import SoftmaxAttention
from model.ops.sparse_attention import Pattern, fixed, masked_attention, pattern_mask, sparse_attention, strided
from model.position import Rotation

_LARGEST = 2**20
_SAMPLES = 256


class SparseConfig(Settings):
    """What the configurations of all patterns share."""

    n_kv_head: int | None = Field(None, ge=1)
    """Key and value heads, which the query heads share evenly; null: n_head, each its own; 1: one for all."""

    def check(self, n_embd: int, n_head: int, head_dim: int) -> None:
        """Raise ValueError where these do not go together."""
        check_kv_heads(n_head, self.n_kv_head)

    def query_dim(self, head_dim: int) -> int:
        """Features of a head's queries, which a rotary position turns in pairs."""
        return head_dim


class TwoSetsConfig(SparseConfig):
    """What strided and fixed attention share: two sets of keys, A1 and A2."""

    merge: bool = False
    """true: every head sees A1 and A2; false: even heads see A1, and odd ones A2."""

    def check(self, n_embd: int, n_head: int, head_dim: int) -> None:
        """Raise ValueError where these do not go together."""
        super().check(n_embd, n_head, head_dim)
        if n_head == 1 and not self.merge:
            raise ValueError("n_head=1 leaves no head for A2: set merge=true, or use more heads")


class StridedConfig(TwoSetsConfig):
    """Child et al. 2019: A1 = the last `stride` keys and the query's own, A2 = every stride-th key before."""

    name: Literal["strided"]
    stride: int = Field(128, ge=1, le=_LARGEST)
    """l, near the root of the length of a text."""

    def build(self, n_embd: int, n_head: int, head_dim: int) -> "SparseAttention":
        """The module for this configuration."""
        kinds = ["both"] if self.merge else ["A1", "A2"]
        return SparseAttention(n_embd, n_head, head_dim, self.n_kv_head, [strided(self.stride, kind) for kind in kinds])


class FixedConfig(TwoSetsConfig):
    """Child et al. 2019: A1 = the query's own block of `size` tokens, A2 = the last `width` tokens of every block.

    Of heads that see A2 alone, the first l - c tokens see nothing: their result is 0.
    """

    name: Literal["fixed"]
    size: int = Field(128, ge=1, le=_LARGEST)
    """l, tokens of a block."""
    width: int = Field(8, ge=1)
    """c, tokens of a block that all later ones see: 1 to l; the paper's are 8, 16 and 32."""

    @model_validator(mode="after")
    def _width_fits(self) -> "FixedConfig":
        if self.width > self.size:
            raise ValueError(f"width={self.width} is more than a block has: use 1 to size={self.size}")
        return self

    def build(self, n_embd: int, n_head: int, head_dim: int) -> "SparseAttention":
        """The module for this configuration."""
        kinds = ["both"] if self.merge else ["A1", "A2"]
        patterns = [fixed(self.size, self.width, kind) for kind in kinds]
        return SparseAttention(n_embd, n_head, head_dim, self.n_kv_head, patterns)


class HeadGroup(NamedTuple):
    """Heads of keys and values whose query heads see by the same patterns: they have a cache of their own."""

    patterns: list[Pattern]
    """Of its query heads; one, if all are the same."""
    heads: list[int]
    """Query heads."""
    kv_heads: list[int]


class SparseAttention(SoftmaxAttention):
    """Causal attention whose heads see the keys of a pattern each. Its state: of each group of heads, what it will see.

    Of A1 this is a window or a block, of fixed attention's A2 c in l of the earlier tokens; of strided attention's A2
    all, since that of the next l tokens is another one in l each time.
    """

    def __init__(
        self, n_embd: int, n_head: int, head_dim: int, n_kv_head: int | None, patterns: Sequence[Pattern]
    ) -> None:
        """`patterns` are given to the heads in turn."""
        super().__init__(n_embd, n_head, head_dim, n_kv_head)
        self.patterns = _one_if_alike([patterns[h % len(patterns)] for h in range(n_head)])
        self.groups = self._grouped_heads()

    def _grouped_heads(self) -> list[HeadGroup]:
        shared = self.n_head // self.n_kv_head  # query heads of a head of keys and values
        groups: dict[frozenset[Pattern], list[int]] = {}
        for g in range(self.n_kv_head):
            seen_by = frozenset(self.patterns[h % len(self.patterns)] for h in range(g * shared, (g + 1) * shared))
            groups.setdefault(seen_by, []).append(g)
        found = []
        for kv_heads in groups.values():
            heads = [g * shared + h for g in kv_heads for h in range(shared)]
            patterns = _one_if_alike([self.patterns[h % len(self.patterns)] for h in heads])
            found.append(HeadGroup(patterns, heads, kv_heads))
        return found

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, state: Any = None, return_state: bool = False
    ) -> tuple[Tensor, Any]:
        """(B, T, n_embd) -> (B, T, n_head * head_dim)."""
        q, k, v = self.project(x, rotation)
        if state is None:
            y = sparse_attention(q, k, v, self.patterns)
            after = self._caches(k, v) if return_state else None
        else:
            y, after = self._continue(q, k, v, state)
        return y.transpose(1, 2).flatten(2), after if return_state else None

    def _caches(self, k: Tensor, v: Tensor) -> tuple[SparseCache, ...]:
        """The groups' caches after the first tokens."""
        return tuple(
            SparseCache.of(_heads(k, group.kv_heads), _heads(v, group.kv_heads), group.patterns)
            for group in self.groups
        )

    def _continue(
        self, q: Tensor, k: Tensor, v: Tensor, state: tuple[SparseCache, ...]
    ) -> tuple[Tensor, tuple[SparseCache, ...]]:
        """Results (B, H, T, D) of T more tokens, and the caches after them."""
        parts, caches = [], []
        for (patterns, heads, kv_heads), cache in zip(self.groups, state, strict=True):
            after, k_all, v_all, j = cache.append(_heads(k, kv_heads), _heads(v, kv_heads), patterns)
            i = positions(after.lengths, q.shape[2], q.device)  # (B or 1, T)
            mask = pattern_mask(patterns, i, j) & (j >= 0)[:, None, None]  # (B, 1 or H, T, S)
            parts.append(self._attend_to_seen(_heads(q, heads), k_all, v_all, mask))
            caches.append(after)
        order = sorted(range(self.n_head), key=[h for group in self.groups for h in group.heads].__getitem__)
        return _heads(torch.cat(parts, dim=1), order), tuple(caches)

    def _attend_to_seen(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Dense, but for keys that a single query sees in no head."""
        if q.shape[2] == 1:
            seen = mask.flatten(0, 2).any(0).nonzero().squeeze(1)
            if 0 < 2 * len(seen) < k.shape[2]:  # copying these costs less than reading all
                k, v, mask = (x.index_select(dim, seen) for x, dim in ((k, 2), (v, 2), (mask, 3)))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self._grouped)

    def mask(self, T: int) -> Tensor:
        """(1 or n_head, T, T), True where query i may attend to key j."""
        t = torch.arange(T, device=self.qkv.weight.device)
        return pattern_mask(self.patterns, t, t)

    def naive(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """What `forward` must equal, by the definition: T x T weights."""
        return masked_attention(*self.project(x, rotation), self.mask(x.shape[1])).transpose(1, 2).flatten(2)

    def flops_per_token(self, seq_len: int) -> int:
        """Scores and their product with the values, for the keys that a token sees on average."""
        j = torch.arange(seq_len, device="cpu")
        # Of long texts a sample, spread by the golden ratio lest it keep step with a pattern.
        i = j if seq_len <= _SAMPLES else (torch.arange(_SAMPLES, device="cpu") * 0.6180339887 % 1 * seq_len).long()
        seen = pattern_mask(self.patterns, i, j).sum() / (len(self.patterns) * len(i))
        return round(4 * self.n_head * self.head_dim * float(seen))


def _heads(x: Tensor, heads: list[int]) -> Tensor:
    """Some heads of (B, H, T, D)."""
    return x if heads == [*range(x.shape[1])] else x[:, heads]


def _one_if_alike(patterns: list[Pattern]) -> list[Pattern]:
    return patterns if len(set(patterns)) > 1 else patterns[:1]
