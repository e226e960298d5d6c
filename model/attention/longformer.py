"""Causal Longformer attention (Beltagy et al. 2020): a window, and global tokens with their own projections."""

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from model.attention.base import Forgetting, GroupedSettings
from model.attention.cache import SparseCache
from model.attention.sparse import LARGEST, SparseAttention
from model.layers import FusedLinear
from model.ops.sparse_attention.patterns import longformer
from model.position import Positions, Rotation, last_positions


class LongformerConfig(GroupedSettings, defaults="model/attention/longformer"):
    """Attention to the last `window` keys and to the first `n_global` keys, the global tokens."""

    name: Literal["longformer"]
    constant_state: ClassVar[bool] = True
    window: int = Field(ge=1, le=LARGEST)
    """Keys that a query attends to, including its own."""
    n_global: int = Field(ge=1, le=LARGEST)
    """Tokens at the beginning that all later tokens attend to as well."""

    def check_documents(self) -> None:
        raise ValueError(
            "longformer's global tokens are the first of a window, not of a document: "
            "use another attention with data.document_reset=true"
        )

    def mechanism(self, n_embd: int, n_head: int, head_dim: int) -> "LongformerAttention":
        return LongformerAttention(self, n_embd, n_head, head_dim)


class LongformerState(NamedTuple):
    """What later tokens can attend to; its size is constant."""

    local: SparseCache
    """Keys and values of the window and of the global tokens, as all tokens attend to them."""
    k_global: Tensor
    """(B, n_kv_head, n_global, head_dim): global tokens' keys for attention among each other, zeros until they come."""
    v_global: Tensor
    """Their values, of the same shape."""


class LongformerAttention(SparseAttention):
    """Every token attends to a window and the global tokens by the projections q, k, v (section 3.1, figure 2d).

    The first n_global tokens are global: the result of their own projections q_g, k_g, v_g ("linear projections for
    global attention"), which start equal to q, k, v, replaces the other. Because attention is causal, global tokens
    attend to each other only.
    """

    def __init__(self, settings: LongformerConfig, n_embd: int, n_head: int, head_dim: int) -> None:
        patterns = [longformer(settings.window, settings.n_global)]
        super().__init__(n_embd, n_head, head_dim, settings.n_kv_head, patterns)
        self.n_global = settings.n_global
        self.qkv_global = FusedLinear(n_embd, self.qkv.parts)
        self.copy_weights()

    def copy_weights(self) -> None:
        self.qkv_global.load_state_dict(self.qkv.state_dict())

    def mix(
        self, x: Tensor, features: Tensor, positions: Positions, state: Any, return_state: bool
    ) -> tuple[Tensor, Any]:
        T, rotation = x.shape[1], positions.rotation
        earlier: Any = state or (None, None, None)
        local, k_g, v_g = earlier
        y, after = self.attend(*self.project(features, rotation), Forgetting(), local, return_state)
        before = local.lengths if local else (0,)
        n = min(T, self.n_global - min(before))  # so many of these tokens are global in some row
        if n > 0:
            first = Rotation(*(x[..., :n, :] for x in rotation)) if rotation else None
            q_g, new_k, new_v = self.project(self.qkv_global(x[:, :n]), first)
            k_g, v_g = self._keep(k_g, new_k, before), self._keep(v_g, new_v, before)
            i = last_positions(tuple(start + n for start in before), n, x.device)  # (B or 1, n)
            mask = torch.arange(self.n_global, device=x.device) <= i.unsqueeze(
                2
            )  # (B or 1, n, n_global)
            gqa = self.n_kv_head < self.n_head
            y_g = scaled_dot_product_attention(
                q_g, k_g, v_g, attn_mask=mask.unsqueeze(1), enable_gqa=gqa
            )
            is_global = (i < self.n_global)[:, None, :, None]
            y = torch.cat([y_g.where(is_global, y[:, :, :n]), y[:, :, n:]], dim=2)
        return self.join(y, rotation), LongformerState(
            after, k_g, v_g
        ) if after and return_state else None

    def _keep(self, kept: Tensor | None, new: Tensor, before: tuple[int, ...]) -> Tensor:
        """Add new global tokens to (B, n_kv_head, n_global, head_dim); row b has before[b] earlier tokens."""
        if kept is None:
            return pad(new, (0, 0, 0, self.n_global - new.shape[2]))
        kept = kept.clone()  # the earlier state must not change
        for row, start in enumerate(before):
            kept[row, :, start : start + new.shape[2]] = new[
                row, :, : max(self.n_global - start, 0)
            ]
        return kept

    def flops_per_token(self, seq_len: int) -> int:
        """Only global tokens use their projections, but the model counts them for every token: subtract the rest."""
        others = max(seq_len - self.n_global, 0) / seq_len
        return super().flops_per_token(seq_len) - round(2 * self.qkv_global.weight.numel() * others)
