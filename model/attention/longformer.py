"""Longformer attention (Beltagy et al. 2020), causal: a window, and global tokens with projections of their own."""

from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from model.attention.cache import SparseCache, positions
from model.attention.sparse import SparseAttention, SparseConfig
from model.ops.sparse_attention import longformer, masked_attention, sparse_attention
from model.position import Rotation, rotate

_LARGEST = 2**20


class LongformerConfig(SparseConfig):
    """The last `window` keys, and the first `n_global` ones, which are global."""

    name: Literal["longformer"]
    window: int = Field(256, ge=1, le=_LARGEST)
    """Keys that a query sees, its own among them."""
    n_global: int = Field(16, ge=1, le=_LARGEST)
    """Tokens at the beginning that all later ones see too."""

    def build(self, n_embd: int, n_head: int, head_dim: int) -> "LongformerAttention":
        """The module for this configuration."""
        return LongformerAttention(n_embd, n_head, head_dim, self.n_kv_head, self.window, self.n_global)


class LongformerState(NamedTuple):
    """What later tokens may still see: of the same size after any number of them."""

    local: tuple[SparseCache, ...]
    """Keys and values of the window and of the global tokens, as all see them; one, as all heads see the same."""
    k_global: Tensor
    """(B, n_kv_head, n_global, head_dim): keys of the global tokens so far, as these see each other; then zeros."""
    v_global: Tensor
    """The same of their values."""


class LongformerAttention(SparseAttention):
    """Every token sees a window and the global tokens, by the projections q, k, v (section 3.1, figure 2d).

    Global tokens, the first n_global, attend by projections q_g, k_g, v_g instead, which begin equal to these ("linear
    projections for global attention"), and their result is written over the other. Causal, they see each other only.
    """

    def __init__(
        self, n_embd: int, n_head: int, head_dim: int, n_kv_head: int | None, window: int, n_global: int
    ) -> None:
        super().__init__(n_embd, n_head, head_dim, n_kv_head, [longformer(window, n_global)])
        self.n_global = n_global
        self.qkv_global = nn.Linear(self.qkv.in_features, self.qkv.out_features)
        with torch.no_grad():
            self.qkv_global.weight.copy_(self.qkv.weight)
            self.qkv_global.bias.copy_(self.qkv.bias)

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, state: Any = None, return_state: bool = False
    ) -> tuple[Tensor, Any]:
        """(B, T, n_embd) -> (B, T, n_head * head_dim)."""
        q, k, v = self.project(x, rotation)
        after = None
        if state is not None:
            y, local = self._continue(q, k, v, state.local)
            y, k_g, v_g = self._written_over(y, x, rotation, state)
            after = LongformerState(local, k_g, v_g)
        else:
            n = min(self.n_global, x.shape[1])
            q_g, k_g, v_g = self._project_global(x, rotation, n)
            y_g = scaled_dot_product_attention(q_g, k_g, v_g, is_causal=True, enable_gqa=self._grouped)
            y = torch.cat([y_g, sparse_attention(q, k, v, self.patterns)[:, :, n:]], dim=2)
            if return_state:
                k_g, v_g = (pad(first, (0, 0, 0, self.n_global - n)) for first in (k_g, v_g))
                after = LongformerState(self._caches(k, v), k_g, v_g)
        return y.transpose(1, 2).flatten(2), after if return_state else None

    def _written_over(
        self, y: Tensor, x: Tensor, rotation: Rotation | None, state: LongformerState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Results (B, H, T, D) of T more tokens, with those of global ones among them, and keys and values of these."""
        before, T, k_g, v_g = state.local[0].lengths, x.shape[1], state.k_global, state.v_global
        if min(before) >= self.n_global:
            return y, k_g, v_g
        q_g, new_k, new_v = self._project_global(x, rotation, T)
        k_g, v_g = self._keep(k_g, new_k, before), self._keep(v_g, new_v, before)
        i = positions(tuple(n + T for n in before), T, x.device)  # (B or 1, T)
        j = torch.arange(self.n_global, device=x.device)
        earlier = (j <= i.unsqueeze(2)).unsqueeze(1)  # (B or 1, 1, T, n_global)
        y_g = scaled_dot_product_attention(q_g, k_g, v_g, attn_mask=earlier, enable_gqa=self._grouped)
        return y_g.where((i < self.n_global)[:, None, :, None], y), k_g, v_g

    def _keep(self, kept: Tensor, new: Tensor, before: tuple[int, ...]) -> Tensor:
        """(B, G, n_global, D) of the first tokens, with what is new of them; row b had before[b] tokens."""
        kept = kept.clone()  # the state before stays as it was
        for row, start in enumerate(before):
            some = new[row, :, : max(self.n_global - start, 0)]
            kept[row, :, start : start + some.shape[1]] = some
        return kept

    def _project_global(self, x: Tensor, rotation: Rotation | None, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """q_g, k_g and v_g of the first n tokens of x."""
        heads = (self.n_head, self.n_kv_head, self.n_kv_head)
        parts = self.qkv_global(x[:, :n]).split([h * self.head_dim for h in heads], dim=-1)
        q, k, v = (part.unflatten(2, (h, self.head_dim)).transpose(1, 2) for part, h in zip(parts, heads, strict=True))
        if rotation is not None:
            rotation = Rotation(rotation.cos[..., :n, :], rotation.sin[..., :n, :])
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, v

    def flops_per_token(self, seq_len: int) -> int:
        """As its patterns have it; less what only global tokens go through, and the model counts for every one."""
        others = max(seq_len - self.n_global, 0) / seq_len
        return super().flops_per_token(seq_len) - round(2 * self.qkv_global.weight.numel() * others)

    def naive(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """What `forward` must equal, by the definition: T x T weights, the global tokens' written over."""
        T = x.shape[1]
        y = masked_attention(*self.project(x, rotation), self.mask(T))
        y_g = masked_attention(*self._project_global(x, rotation, T), self.mask(T))
        i = torch.arange(T, device=x.device).unsqueeze(1)
        return y_g.where(i < self.n_global, y).transpose(1, 2).flatten(2)
