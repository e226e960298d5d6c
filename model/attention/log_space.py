"""Log-space attention (Heinsen 2024), with a state of constant size."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from model.attention.base import Attention, Forgetting, ForgettingSettings
from model.ops.log_attention import (
    LOG_SPACE,
    SIGNED,
    empty_state,
    log_attention,
    naive_log_attention,
)
from model.position import Rotation


class _Sizes(ForgettingSettings, defaults="model/attention/log_space"):
    constant_state: ClassVar[bool] = True
    suits_rotary: ClassVar[bool] = False  # no better than no positions (docs/attention.md)
    d_key: int | None = Field(ge=1, le=2**24)
    """Features of a head's queries and keys; null: head_dim, or with a product 2 sqrt(head_dim)."""
    d_val: int | None = Field(ge=1, le=2**24)
    """Features of a head's values; null: head_dim."""
    product: bool
    """Whether the similarity is a product of two, each of half of the features: the state then has
    a feature for each pair of one in the first half and one in the second, (d_key / 2)^2 in all."""

    def check(self, n_head: int, head_dim: int) -> None:
        """Raise ValueError if there are no halves."""
        if self.product and self.query_dim(head_dim) % 2:
            raise ValueError(f"d_key={self.d_key} is odd: product=true needs an even number")

    def query_dim(self, head_dim: int) -> int:
        if self.d_key is not None:
            return self.d_key
        return 2 * round(head_dim**0.5) if self.product else head_dim


class LogSpaceConfig(_Sizes):
    """Similarity log(exp(q) exp(k)^T); keys, queries, values and results are logarithms."""

    name: Literal["log_space"]

    def mechanism(self, n_embd: int, n_head: int, head_dim: int) -> "LogSpaceAttention":
        return LogSpaceAttention(self, n_embd, n_head, head_dim)


class LogSpaceSignedConfig(_Sizes, defaults="model/attention/log_space_signed"):
    """Log-space attention over values of either sign; the result is not a logarithm."""

    name: Literal["log_space_signed"]

    def mechanism(self, n_embd: int, n_head: int, head_dim: int) -> "LogSpaceSignedAttention":
        return LogSpaceSignedAttention(self, n_embd, n_head, head_dim)


class LogSpaceAttention(Attention):
    """Causal log-space attention. Its result is log_y: it stays in log space."""

    resets = True
    form = LOG_SPACE

    def __init__(self, settings: _Sizes, n_embd: int, n_head: int, head_dim: int) -> None:
        d_key = settings.query_dim(head_dim)
        d_val = settings.d_val or head_dim
        super().__init__(n_embd, n_head, n_head * d_val, (d_key, d_key, d_val), n_repeat=n_head)
        self.d_key = d_key
        self.d_val = d_val
        self.product = settings.product
        self.state_features = (d_key // 2) ** 2 if settings.product else d_key

    def project(self, features: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, log_v = super().project(features, rotation)
        if self.product:
            q = pairs_of(q)
            k = pairs_of(k)
        return q, k, log_v

    def split(self, features: Tensor) -> Sequence[Tensor]:
        """(B, T, n_qkv) -> q and k (B, n_head, T, d_key), log_v (B, n_head, T, d_val)."""
        heads = features.unflatten(2, (self.n_head, -1)).transpose(1, 2)
        return heads.split([self.d_key, self.d_key, self.d_val], dim=-1)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        forgetting: Forgetting,
        state: Any,
        return_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        options: Any = {"form": self.form, "state": state, "return_state": return_state}
        result: Any = log_attention(q, k, v, forgetting.log_f, **options)
        return result if return_state else (result, None)

    def naive_attend(self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None) -> Tensor:
        return cast(Tensor, naive_log_attention(q, k, v, log_f, form=self.form))

    def initial_state(self, B: int, device: torch.device) -> Tensor:
        no_tokens = torch.empty(B, self.n_head, 0, 1, dtype=self.qkv.weight.dtype, device=device)
        q = no_tokens.expand(-1, -1, -1, self.state_features)
        return empty_state(q, no_tokens.expand(-1, -1, -1, self.d_val))

    def flops_per_token(self, seq_len: int) -> int:
        return self.chunked_flops(seq_len, self.state_features, self.d_val)


class LogSpaceSignedAttention(LogSpaceAttention):
    """Log-space attention over values of either sign."""

    form = SIGNED


def pairs_of(x: Tensor) -> Tensor:
    """(..., 2 n) -> (..., n^2): a_i + b_j for each a_i of the first half and b_j of the second."""
    a, b = x.chunk(2, dim=-1)
    return (a.unsqueeze(-1) + b.unsqueeze(-2)).flatten(-2)
