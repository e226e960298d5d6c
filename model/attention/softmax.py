"""Softmax attention: the baseline that every claim about another mechanism is measured against."""

import functools
import warnings
from contextlib import nullcontext
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from common.console import say_once
from common.settings import UserError
from model.attention.base import Forgetting, GroupedSettings, MultiHeadAttention
from model.attention.cache import attend_to_all
from model.ops.custom import accumulation_dtype, aligned, assume_constant_result, running_sum
from model.ops.sparse_attention.attend import forgetting_attention

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class SoftmaxConfig(GroupedSettings, defaults="model/attention/softmax"):
    """softmax(q k^T / sqrt(head_dim)) v, by torch's fused kernels."""

    name: Literal["softmax"]
    decay: Literal["none", "head"]
    """head: scores have the logarithm of what a head forgets between key and query added (Lin et al. 2025)."""
    kernel: Literal["auto", "flash", "efficient", "cudnn", "math"]
    """torch's kernel for whole texts, as in training; auto: the fastest that can run. Decoding always uses auto."""

    @model_validator(mode="after")
    def _kernel_fits(self) -> "SoftmaxConfig":
        if self.kernel != "auto" and self.decay != "none":
            raise ValueError(
                f"kernel={self.kernel} cannot be used with decay={self.decay}: use auto"
            )
        return self

    def check_documents(self) -> None:
        if self.kernel != "auto":
            raise ValueError(
                f"kernel={self.kernel} cannot be used with data.document_reset=true, a mask: use auto"
            )

    def mechanism(self, n_embd: int, n_head: int, head_dim: int) -> "SoftmaxAttention":
        return SoftmaxAttention(self, n_embd, n_head, head_dim)


class SoftmaxAttention(MultiHeadAttention):
    """Causal softmax attention; its state is a cache of keys and values."""

    def __init__(self, settings: SoftmaxConfig, n_embd: int, n_head: int, head_dim: int) -> None:
        super().__init__(n_embd, n_head, head_dim, settings.n_kv_head)
        self.kernel = settings.kernel

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        forgetting: Forgetting,
        state: Any,
        return_state: bool,
    ) -> tuple[Tensor, Any]:
        log_f, starts = forgetting
        if log_f is not None and state is None and not return_state:
            y = forgetting_attention(q, k, v, log_f, starts)
            if y is not None:
                return y, None
        if (
            log_f is not None
        ):  # in float32 or float64: rounded scores would leave nothing of the gates' gradients
            wide = accumulation_dtype(q)
            with torch.autocast(q.device.type, enabled=False):
                q_k_v = q.to(wide), k.to(wide), v.to(wide)
                y, after = self._attend_and_forget(*q_k_v, state, return_state, log_f, starts)
            return y.to(q.dtype), after
        whole_text = state is None and starts is None
        if whole_text:
            _say_kernel(
                self.kernel, q.device.type, q.dtype, self.n_head, self.n_kv_head, self.head_dim
            )
        with (
            sdpa_kernel(_KERNELS[self.kernel])
            if whole_text and self.kernel != "auto"
            else nullcontext()
        ):
            return attend_to_all(state, q, k, v, return_state, starts)

    def _attend_and_forget(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Any,
        return_state: bool,
        log_f: Tensor,
        starts: Tensor | None,
    ) -> tuple[Tensor, Any]:
        """Add a_t - a_j to the scores, a being the sum of log_f over the text so far, by features of q and k.

        So torch's fused kernels can be used. Each a is a sum of two numbers, and a feature of 1 reads each. Rounding
        grows with the text: scores err by about 1e-7 a, and a is all that was forgotten since the text started.
        State: the cache, and a after the last token.
        """
        k, v = self.repeated(k), self.repeated(v)  # a is that of a query head
        cache, before = state or (None, 0.0)
        a = running_sum(log_f.double(), 2) + before  # (B, H, T, 1)
        scaled = a * self.head_dim**0.5
        high = scaled.to(q.dtype)
        own = torch.cat([high, (scaled - high).to(q.dtype)], -1)  # more digits than the scores
        ones = torch.ones_like(own)
        q, k = torch.cat([q, own, ones], -1), torch.cat([k, ones, -own], -1)
        q, k, v = (aligned(x, self.head_dim + 4) for x in (q, k, v))
        y, after = attend_to_all(cache, q, k, v, return_state, starts, scale=self.head_dim**-0.5)
        return y[..., : self.head_dim], (after, a[:, :, -1:])


@assume_constant_result
def _say_kernel(
    asked: str, device: str, dtype: torch.dtype, n_head: int, n_kv_head: int, head_dim: int
) -> str:
    used = kernel_in_use(asked, device, dtype, n_head, n_kv_head, head_dim)
    say_once(f"softmax attention by torch's {used} kernel")
    return used


@functools.cache
def kernel_in_use(
    asked: str, device: str, dtype: torch.dtype, n_head: int, n_kv_head: int, head_dim: int
) -> str:
    """Return which of torch's kernels such a model uses for whole texts: "flash", "efficient", "cudnn" or "math".

    Raises:
        UserError: the requested kernel cannot run.
    """
    q = torch.zeros(1, n_head, 8, head_dim, device=device, dtype=dtype)
    kv = torch.zeros(1, n_kv_head, 8, head_dim, device=device, dtype=dtype)
    if asked == "auto":  # torch has no public function for this
        choice = torch._fused_sdp_choice(q, kv, kv, None, 0.0, True, enable_gqa=n_kv_head < n_head)
        return next((name for name, backend in _KERNELS.items() if backend.value == choice), "own")
    able = [name for name in _KERNELS if _runs(name, q, kv)]
    if asked not in able:
        raise UserError(
            f"attention.kernel={asked} cannot run on {device} in {str(dtype)[6:]}, with {n_head} query heads and "
            f"{n_kv_head} key heads of {head_dim} features: use auto, or one of {', '.join(able)}"
        )
    return asked


def _runs(name: str, q: Tensor, kv: Tensor) -> bool:
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            sdpa_kernel(_KERNELS[name]),
        ):  # torch warns why it cannot
            scaled_dot_product_attention(
                q, kv, kv, is_causal=True, enable_gqa=kv.shape[1] < q.shape[1]
            )
    except RuntimeError:
        return False
    return True
