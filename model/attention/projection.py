"""Projection attention (Sanger 2025): weights fall off with the squared distance of query and key."""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from common.settings import Settings
from model.attention.base import Attention, check_kv_heads
from model.attention.cache import KVCache
from model.ops.projection_attention import inner_keys, inner_queries, naive_projection_attention, padded_values
from model.position import Rotation, rotate


class ProjectionConfig(Settings):
    """Weights proportional to exp(-||q - k||^2 / (2 sigma^2)), by torch's fused kernels."""

    name: Literal["projection"]
    values: Literal["keys", "own"] = "own"
    """keys: they are the values too, with no projection and no cache of their own; own: a projection of their own."""
    sigma: float | None = Field(None, ge=1e-6, le=1e6)
    """Distance at which a weight is exp(-1/2); null: head_dim^(1/4), with which q and k, which are not normalised here,
    meet with softmax attention's scale 1 / sqrt(head_dim). The paper's 0.01 is for rows of norm 1."""
    learned: bool = False
    """Whether sigma is only where each head's own begins."""
    n_kv_head: int | None = Field(None, ge=1)
    """Heads of keys and values, a divisor of n_head, each shared by as many heads of queries; null: n_head."""

    def build(self, n_embd: int, n_head: int, head_dim: int) -> "ProjectionAttention":
        """The module for this configuration."""
        sigma = head_dim**0.25 if self.sigma is None else self.sigma
        n_kv_head = self.n_kv_head or n_head
        return ProjectionAttention(n_embd, n_head, n_kv_head, head_dim, sigma, self.learned, self.values == "own")

    def check(self, n_embd: int, n_head: int, head_dim: int) -> None:
        """Raise ValueError where the heads cannot be shared."""
        check_kv_heads(n_head, self.n_kv_head)

    def query_dim(self, head_dim: int) -> int:
        """Features of a head's queries, which a rotary position turns in pairs."""
        return head_dim


class ProjectionAttention(Attention):
    """Causal multi-head attention by distance; its state is a key-value cache.

    Where keys are the values too, a rotation turns these as it turns keys, and the result back by its query's angles:
    so values depend on the distance between tokens and not on where the text begins.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        n_kv_head: int,
        head_dim: int,
        sigma: float,
        learned: bool = False,
        own_values: bool = True,
    ) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim, self.own_values = n_head, n_kv_head, head_dim, own_values
        self.n_out = n_head * head_dim
        self.qkv = nn.Linear(n_embd, (n_head + (2 if own_values else 1) * n_kv_head) * head_dim)
        self.first_sigma = sigma
        self.log_sigma = nn.Parameter(torch.full((n_head,), math.log(sigma))) if learned else None

    @property
    def sigma(self) -> Tensor:
        """(n_head,)."""
        if self.log_sigma is not None:
            return self.log_sigma.exp()
        weight = self.qkv.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return torch.full((self.n_head,), self.first_sigma, dtype=dtype, device=weight.device)

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, state: KVCache | None = None, return_state: bool = False
    ) -> tuple[Tensor, KVCache | None]:
        """(B, T, n_embd) -> (B, T, n_head * head_dim)."""
        q, k, v = self.project(x, rotation)
        q, k = inner_queries(q, self.sigma), inner_keys(k)  # (B, H, T, D'), (B, H_kv, T, D')
        v = padded_values(v) if self.own_values else k[..., :0]  # keys are cached once
        mask, after = None, None
        if state is not None:
            after, k, v, mask = state.append(k, v)
        elif return_state:
            after = KVCache.of(k, v)
        y = scaled_dot_product_attention(
            q,
            k,
            v if self.own_values else k,
            attn_mask=mask,
            is_causal=state is None,
            scale=1.0,
            enable_gqa=self.n_kv_head < self.n_head,
        )[..., : self.head_dim]  # (B, H, T, D)
        return self._joined(y, rotation), after if return_state else None

    def naive(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """What `forward` must equal, by the definition: distances of all pairs."""
        q, k, v = self.project(x, rotation)
        k, v = (head.repeat_interleave(self.n_head // self.n_kv_head, dim=1) for head in (k, v))
        return self._joined(naive_projection_attention(q, k, v, self.sigma, self.mask(x.shape[1])), rotation)

    def mask(self, T: int) -> Tensor:
        """(1, T, T): True where a query may attend."""
        return torch.ones(1, T, T, dtype=torch.bool, device=self.qkv.weight.device).tril()

    def project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, T, D), k and v (B, H_kv, T, D)."""
        heads = self.qkv(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)  # (B, H + H_kv or 2 H_kv, T, D)
        q, k, *own = heads.tensor_split((self.n_head, self.n_head + self.n_kv_head), dim=1)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, own[0] if self.own_values else k

    def _joined(self, y: Tensor, rotation: Rotation | None) -> Tensor:
        """(B, H, T, D) -> (B, T, H D)."""
        if rotation is not None and not self.own_values:
            y = rotate(y, Rotation(rotation.cos, -rotation.sin))
        return y.transpose(1, 2).flatten(2)

    def flops_per_token(self, seq_len: int) -> int:
        """Scores and their product with the values; a causal token sees half of the sequence on average."""
        return 2 * self.n_head * seq_len * self.head_dim
