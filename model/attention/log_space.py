"""Log-space attention (Heinsen 2024): softmax attention in log space, with a state of constant size."""

from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from common.settings import Settings
from model.attention.base import Attention
from model.ops.log_attention import LogAttentionState, log_attention, naive_log_attention
from model.ops.log_attention.chunks import CHUNK
from model.ops.log_attention.signed import split_signs
from model.position import Rotation, rotate

_SMALLEST_VALUE = 1e-30  # a product with it, and with a weight, is still in the range of float32 and bfloat16


class _Sizes(Settings):
    d_key: int | None = Field(None, ge=1)
    """Features of a head's queries and keys; null: head_dim."""
    d_val: int | None = Field(None, ge=1)
    """Features of a head's values; null: head_dim."""

    def query_dim(self, head_dim: int) -> int:
        """Features of a head's queries, which a rotary position turns in pairs."""
        return self.d_key or head_dim


class LogSpaceConfig(_Sizes):
    """Similarity log(exp(q) exp(k)^T); keys, queries and values are logarithms, and so is the result."""

    name: Literal["log_space"]

    def build(self, n_embd: int, n_head: int, head_dim: int) -> "LogSpaceAttention":
        """The module for this configuration."""
        return LogSpaceAttention(n_embd, n_head, self.query_dim(head_dim), self.d_val or head_dim)


class LogSpaceSignedConfig(_Sizes):
    """Log-space attention over values of either sign; the result is not a logarithm."""

    name: Literal["log_space_signed"]

    def build(self, n_embd: int, n_head: int, head_dim: int) -> "LogSpaceSignedAttention":
        """The module for this configuration."""
        return LogSpaceSignedAttention(n_embd, n_head, self.query_dim(head_dim), self.d_val or head_dim)


class LogSpaceAttention(Attention):
    """Projects x to (q, k, log_v) of every head and returns log_y: the result stays in log space."""

    def __init__(self, n_embd: int, n_head: int, d_key: int, d_val: int) -> None:
        super().__init__()
        self.n_head, self.d_key, self.d_val = n_head, d_key, d_val
        self.n_out = n_head * d_val
        self.qkv = nn.Linear(n_embd, n_head * (2 * d_key + d_val))

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        state: LogAttentionState | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, LogAttentionState | None]:
        """(B, T, n_embd) -> (B, T, n_head * d_val)."""
        y, after = self._attend(*self._project(x, rotation), state, return_state)  # (B, H, T, d_val)
        return y.transpose(1, 2).flatten(2), after

    def naive(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """What `forward` must equal, by the definition: all latent sums."""
        return self._attend_naive(*self._project(x, rotation)).transpose(1, 2).flatten(2)

    def _project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """q and k (B, H, T, d_key), v (B, H, T, d_val)."""
        B, T, _ = x.shape
        x, sizes = self.qkv(x).view(B, T, self.n_head, -1), (self.d_key, self.d_key, self.d_val)
        qkv = _Split.apply(x, *sizes) if torch.is_grad_enabled() else x.split(sizes, dim=-1)  # cheaper to call
        q, k, v = (x.transpose(1, 2) for x in qkv)  # (B, H, T, .)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, v

    def _attend_naive(self, q: Tensor, k: Tensor, log_v: Tensor) -> Tensor:
        return cast(Tensor, naive_log_attention(q, k, log_v))

    def _attend(
        self, q: Tensor, k: Tensor, log_v: Tensor, state: LogAttentionState | None, return_state: bool
    ) -> tuple[Tensor, LogAttentionState | None]:
        if not return_state:  # the operator need not be certain of a state that nobody wants
            return cast(Tensor, log_attention(q, k, log_v, state=state)), None
        log_y, after = log_attention(q, k, log_v, state=state, return_state=True)
        return log_y, cast(LogAttentionState, after)

    def flops_per_token(self, seq_len: int) -> int:
        """Per chunk of C tokens: C x C scores, their product with the values, the state read and written."""
        C = min(CHUNK, seq_len)
        return 2 * self.n_head * (C * self.d_key + C * self.d_val + 2 * self.d_key * self.d_val)


class _Split(torch.autograd.Function):
    """torch.split of the last dimension. Its own gradient is a torch.cat, which copies such short rows slowly."""

    @staticmethod
    def forward(x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
        return x.split(sizes, dim=-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, *ctx.sizes = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole = gradients[0].new_empty(*gradients[0].shape[:-1], sum(ctx.sizes))
        for part, gradient in zip(whole.split(ctx.sizes, dim=-1), gradients, strict=True):
            part.copy_(gradient)
        return whole, *(None for _ in ctx.sizes)


def _away_from_zero(v: Tensor) -> Tensor:
    """v, but 1e-30 where it is smaller, with v's gradient: y is linear in v, but passes it on through log |v|."""
    short = torch.where(v.abs() < _SMALLEST_VALUE, _SMALLEST_VALUE - v.detach(), 0)
    return v + short


class LogSpaceSignedAttention(LogSpaceAttention):
    """The same over values v of either sign: positive and negative ones are summed apart, and y is their difference."""

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: LogAttentionState | None, return_state: bool
    ) -> tuple[Tensor, LogAttentionState | None]:
        v = _away_from_zero(v)
        log_y, after = super()._attend(q, k, split_signs(v.abs().log(), v.sign()), state, return_state)
        positive, negative = log_y.exp().chunk(2, dim=-1)
        return positive - negative, after

    def _attend_naive(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """softmax(log(exp(q) exp(k)^T)) v, its weights written out: a sign is nothing to them."""
        scores = (q.unsqueeze(3) + k.unsqueeze(2)).logsumexp(-1)  # (B, H, T, T)
        future = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(future, -torch.inf).softmax(-1) @ v

    def flops_per_token(self, seq_len: int) -> int:
        """Twice the value columns."""
        C = min(CHUNK, seq_len)
        return 2 * self.n_head * (C * self.d_key + 2 * C * self.d_val + 4 * self.d_key * self.d_val)
