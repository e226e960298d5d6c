"""Softmax attention: the control that every claim about another mechanism is measured against."""

import functools
import warnings
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from common.console import say_once
from common.settings import Settings, UserError
from model.attention.base import Attention, check_kv_heads
from model.attention.cache import KVCache
from model.ops.sparse_attention import masked_attention
from model.position import Rotation, rotate

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class SoftmaxConfig(Settings):
    """softmax(q k^T / sqrt(head_dim)) v, by torch's fused kernels."""

    name: Literal["softmax"]
    n_kv_head: int | None = Field(None, ge=1)
    """Key and value heads, which the query heads share evenly; null: n_head, each its own; 1: one for all."""
    kernel: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """torch's kernel for whole texts, as in training; auto: the fastest that can run. Decoding is always auto."""

    def check(self, n_embd: int, n_head: int, head_dim: int) -> None:
        """Raise ValueError where these do not go together."""
        check_kv_heads(n_head, self.n_kv_head)

    def build(self, n_embd: int, n_head: int, head_dim: int) -> "SoftmaxAttention":
        """The module for this configuration."""
        return SoftmaxAttention(n_embd, n_head, head_dim, self.n_kv_head or n_head, self.kernel)

    def query_dim(self, head_dim: int) -> int:
        """Features of a head's queries, which a rotary position turns in pairs."""
        return head_dim


class SoftmaxAttention(Attention):
    """Causal attention with n_head query heads over n_kv_head key and value heads; its state is their cache.

    As many: multi-head attention (Vaswani et al. 2017). One: multi-query (Shazeer 2019). Between: grouped-query, where
    query head h has key and value head h // (n_head / n_kv_head) (Ainslie et al. 2023).
    """

    def __init__(self, n_embd: int, n_head: int, head_dim: int, n_kv_head: int | None = None, kernel: str = "auto"):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim, self.kernel = n_head, n_kv_head or n_head, head_dim, kernel
        self.n_out = n_head * head_dim
        self.qkv = nn.Linear(n_embd, (n_head + 2 * self.n_kv_head) * head_dim)

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, state: KVCache | None = None, return_state: bool = False
    ) -> tuple[Tensor, KVCache | None]:
        """(B, T, n_embd) -> (B, T, n_head * head_dim)."""
        q, k, v = self.project(x, rotation)
        if state is None:
            y = self._whole(q, k, v)
            after = KVCache.of(k, v) if return_state else None
        else:
            after, k, v, mask = state.append(k, v)
            y = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self._grouped)
        return y.transpose(1, 2).flatten(2), after if return_state else None

    def project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, n_head, T, head_dim), and k and v, (B, n_kv_head, T, head_dim)."""
        heads = (self.n_head, self.n_kv_head, self.n_kv_head)
        parts = self.qkv(x).split([n * self.head_dim for n in heads], dim=-1)
        q, k, v = (part.unflatten(2, (n, self.head_dim)).transpose(1, 2) for part, n in zip(parts, heads, strict=True))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, v

    def mask(self, T: int) -> Tensor:
        """(1, T, T), True where query i may attend to key j: j <= i."""
        return torch.ones(1, T, T, dtype=torch.bool, device=self.qkv.weight.device).tril()

    def naive(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """What `forward` must equal, by the definition: T x T weights."""
        return masked_attention(*self.project(x, rotation), self.mask(x.shape[1])).transpose(1, 2).flatten(2)

    @property
    def _grouped(self) -> bool:
        return self.n_kv_head < self.n_head

    def _whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A text from its beginning, by the kernel that was asked for."""
        _say_kernel(self.kernel, q.device.type, q.dtype, self.n_head, self.n_kv_head, self.head_dim)
        if self.kernel == "auto":
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self._grouped)
        with sdpa_kernel(_KERNELS[self.kernel]):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self._grouped)

    def flops_per_token(self, seq_len: int) -> int:
        """Scores and their product with the values; a causal token sees half of the sequence on average."""
        return 2 * self.n_head * seq_len * self.head_dim


@torch.compiler.assume_constant_result
def _say_kernel(asked: str, device: str, dtype: torch.dtype, n_head: int, n_kv_head: int, head_dim: int) -> str:
    used = kernel_in_use(asked, device, dtype, n_head, n_kv_head, head_dim)
    say_once(f"softmax attention by torch's {used} kernel")
    return used


@functools.cache
def kernel_in_use(asked: str, device: str, dtype: torch.dtype, n_head: int, n_kv_head: int, head_dim: int) -> str:
    """Which of torch's kernels attends to whole texts in such a model: "flash", "efficient", "cudnn" or "math".

    Raises:
        UserError: the kernel that was asked for cannot run.
    """
    q = torch.zeros(1, n_head, 8, head_dim, device=device, dtype=dtype)
    kv = torch.zeros(1, n_kv_head, 8, head_dim, device=device, dtype=dtype)
    if asked == "auto":  # no public function tells it
        choice = torch._fused_sdp_choice(q, kv, kv, None, 0.0, True, enable_gqa=n_kv_head < n_head)
        return next((name for name, backend in _KERNELS.items() if backend.value == choice), "own")
    able = [name for name in _KERNELS if _runs(name, q, kv)]
    if asked not in able:
        raise UserError(
            f"attention.kernel={asked} cannot run on {device} in {str(dtype)[6:]}, with {n_head} "
            f"heads of {head_dim} features and {n_kv_head} of keys: use auto, or one of {', '.join(able)}"
        )
    return asked


def _runs(name: str, q: Tensor, kv: Tensor) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"), sdpa_kernel(_KERNELS[name]):  # it warns why it does not
            scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=kv.shape[1] < q.shape[1])
    except RuntimeError:
        return False
    return True
