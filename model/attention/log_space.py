"""Log-space attention (Heinsen 2024), with a state of constant size."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from model.attention.base import Attention, AttentionInputs, ForgettingSettings, Traits
from model.ops.custom import CHUNK, accumulation_dtype
from model.ops.log_attention import LOG_SPACE, SIGNED, Form, log_attention, naive_log_attention
from model.position import NO_POSITIONS, Positions


class _Sizes(ForgettingSettings, defaults="model/attention/log_space"):
    # Rotary positions are no better than none (docs/attention.md).
    traits: ClassVar[Traits] = Traits(state="fixed", rotary=False)
    d_key: int | None = Field(ge=1, le=2**24)
    """Features of a head's queries and keys; null: head_dim, or with a product 2 sqrt(head_dim)."""
    d_val: int | None = Field(ge=1, le=2**24)
    """Features of a head's values; null: head_dim."""
    product: bool
    """Whether the similarity is a product of two, each of half of the features: the state then has
    a feature for each pair of one in the first half and one in the second, (d_key / 2)^2 in all."""

    def mismatch(self, n_head: int, head_dim: int) -> str | None:
        if self.product and self.query_dim(head_dim) % 2:
            return f"d_key={self.d_key} is odd: product=true needs an even number"
        return None

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


class FeatureAttention(Attention):
    """Causal attention by positive features. The state is a sum over the tokens so far."""

    form: Form
    restarts = True
    state_features: int
    """Rows of a head's state."""
    d_val: int

    def attend(
        self, inputs: AttentionInputs, state: Any, return_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Everything is forgotten where a document starts."""
        q, k, v, log_f, positions = inputs
        starts = positions.document_starts
        if starts is not None:
            if log_f is None:
                log_f = q.new_zeros(*q.shape[:3], 1, dtype=accumulation_dtype(q))
            log_f = log_f.masked_fill(starts[:, None, :, None], -torch.inf)
        options: Any = {"form": self.form, "state": state, "return_state": return_state}
        result: Any = log_attention(q, k, v, log_f, **options)
        return result if return_state else (result, None)

    def naive_attend(self, inputs: AttentionInputs) -> Tensor:
        return cast(Tensor, naive_log_attention(*inputs[:4], form=self.form))

    def initial_state(self, B: int, device: torch.device) -> Tensor:
        shape = B, self.n_head, self.state_features, self.d_val + 1
        return torch.zeros(shape, dtype=accumulation_dtype(self.qkv.weight), device=device)

    def flops_per_token(self, seq_len: int) -> int:
        """Chunks of C tokens have C x C scores and their product with the values, and the state is
        read and written."""
        C = min(CHUNK, seq_len)
        n_products = C * (self.state_features + self.d_val) + 2 * self.state_features * self.d_val
        return 2 * self.n_head * n_products


class LogSpaceAttention(FeatureAttention):
    """Causal log-space attention. Its result is log_y: it stays in log space."""

    form = LOG_SPACE

    def __init__(self, settings: _Sizes, n_embd: int, n_head: int, head_dim: int) -> None:
        d_key = settings.query_dim(head_dim)
        d_val = settings.d_val or head_dim
        sizes = d_key, d_key, d_val
        super().__init__(n_embd, n_head, n_head * d_val, sizes, n_repeat=n_head)
        self.sizes = sizes
        self.d_val = d_val
        self.product = settings.product
        self.state_features = (d_key // 2) ** 2 if settings.product else d_key

    def project(
        self, features: Tensor, log_f: Tensor | None = None, positions: Positions = NO_POSITIONS
    ) -> AttentionInputs:
        inputs = super().project(features, log_f, positions)
        if not self.product:
            return inputs
        return inputs._replace(q=add_pairs(inputs.q), k=add_pairs(inputs.k))

    def split(self, features: Tensor) -> Sequence[Tensor]:
        """(B, T, n_qkv) -> q and k (B, n_head, T, d_key), log_v (B, n_head, T, d_val)."""
        heads = features.unflatten(2, (self.n_head, -1)).transpose(1, 2)
        # Not those of qkv, which a library for LoRA may replace by a layer of its own.
        return heads.split(self.sizes, dim=-1)


class LogSpaceSignedAttention(LogSpaceAttention):
    """Log-space attention over values of either sign."""

    form = SIGNED


def add_pairs(x: Tensor) -> Tensor:
    """(..., 2 n) -> (..., n^2): a_i + b_j for each a_i of the first half and b_j of the second."""
    a, b = x.chunk(2, dim=-1)
    return (a.unsqueeze(-1) + b.unsqueeze(-2)).flatten(-2)
