"""Softmax attention: the control that every claim about another mechanism is measured against."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from common.settings import Settings
from model.attention.base import Attention
from model.position import Rotation, rotate


class SoftmaxConfig(Settings):
    """softmax(q k^T / sqrt(head_dim)) v, by torch's fused kernels."""

    name: Literal["softmax"]

    def build(self, n_embd: int, n_head: int, head_dim: int) -> "SoftmaxAttention":
        """The module for this configuration."""
        return SoftmaxAttention(n_embd, n_head, head_dim)

    def query_dim(self, head_dim: int) -> int:
        """Features of a head's queries, which a rotary position turns in pairs."""
        return head_dim


class KVCache(NamedTuple):
    """Keys and values of all tokens so far."""

    k: Tensor
    """(B, H, S, head_dim)."""
    v: Tensor
    """(B, H, S, head_dim)."""


class SoftmaxAttention(Attention):
    """Causal multi-head attention; its state is a key-value cache."""

    def __init__(self, n_embd: int, n_head: int, head_dim: int) -> None:
        super().__init__()
        self.n_head, self.head_dim = n_head, head_dim
        self.n_out = n_head * head_dim
        self.qkv = nn.Linear(n_embd, 3 * self.n_out)

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, state: KVCache | None = None, return_state: bool = False
    ) -> tuple[Tensor, KVCache | None]:
        """(B, T, n_embd) -> (B, T, n_head * head_dim)."""
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, self.head_dim).permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        mask = None
        if state is not None:
            k, v = torch.cat([state.k, k], dim=2), torch.cat([state.v, v], dim=2)
            S = k.shape[2]  # query i of this call is token S - T + i
            mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T) if T > 1 else None
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=state is None)
        return y.transpose(1, 2).reshape(B, T, -1), KVCache(k, v) if return_state else None

    def flops_per_token(self, seq_len: int) -> int:
        """Scores and their product with the values; a causal token sees half of the sequence on average."""
        return 2 * self.n_head * seq_len * self.head_dim
