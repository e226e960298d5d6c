"""Softmax attention: the baseline that every claim about another mechanism is measured against."""

import functools
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from common.console import say_once
from model.attention.base import (
    AttentionInputs,
    ForgettingSettings,
    MultiHeadAttention,
    SharedHeadSettings,
)
from model.attention.cache import attend_to_all
from model.ops.custom import accumulation_dtype, aligned, assume_constant_result, running_sum
from model.ops.sparse_attention.attend import forgetting_attention, repeated


class SoftmaxConfig(SharedHeadSettings, ForgettingSettings, defaults="model/attention/softmax"):
    """softmax(q k^T / sqrt(head_dim)) v, by torch's fused kernels.

    With decay, scores have the logarithm of what a head forgets between key and query added (Lin et
    al. 2025).
    """

    name: Literal["softmax"]

    def mechanism(self, n_embd: int, n_head: int, head_dim: int) -> "SoftmaxAttention":
        return SoftmaxAttention(self, n_embd, n_head, head_dim)


class SoftmaxAttention(MultiHeadAttention):
    """Causal softmax attention; its state is a cache of keys and values."""

    def __init__(self, settings: SoftmaxConfig, n_embd: int, n_head: int, head_dim: int) -> None:
        super().__init__(n_embd, n_head, head_dim, settings.n_kv_head)

    def attend(self, inputs: AttentionInputs, state: Any, return_state: bool) -> tuple[Tensor, Any]:
        if inputs.log_f is not None:
            return self._attend_and_forget(inputs, state, return_state)
        if state is None and inputs.positions.document_starts is None:
            q = inputs.q
            _say_kernel(q.device.type, q.dtype, self.n_head, self.n_kv_head, self.head_dim)
        return attend_to_all(inputs, state, return_state)

    def _attend_and_forget(
        self, inputs: AttentionInputs, state: Any, return_state: bool
    ) -> tuple[Tensor, Any]:
        """Add a_t - a_j to the scores, a being the sum of log_f over the text so far.

        State: the cache, and a after the last token.
        """
        q, k, v, log_f, positions = inputs
        assert log_f is not None
        if state is None and not return_state:
            y = forgetting_attention(q, k, v, log_f, positions.document_starts)
            if y is not None:
                return y, None
        wide = accumulation_dtype(q)  # rounded scores would leave nothing of the gates' gradients
        with torch.autocast(q.device.type, enabled=False):
            cache, before = state or (None, 0.0)
            a = running_sum(log_f.double(), 2) + before  # (B, H, T, 1)
            k = repeated(k.to(wide), self.n_head)  # each query head has its own a
            v = repeated(v.to(wide), self.n_head)
            q_wide, k = self._with_gates(q.to(wide), k, a)
            inputs = inputs._replace(q=q_wide, k=k, v=aligned(v, self.head_dim + 4))
            y, cache = attend_to_all(inputs, cache, return_state, self.head_dim**-0.5)
        return y[..., : self.head_dim].to(q.dtype), (cache, a[:, :, -1:])

    def _with_gates(self, q: Tensor, k: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k with features that add a_t - a_j to scores, so that torch's fused kernels
        can be used.

        Two features hold each a, as a number and its rounding error. The other side has 1 in these
        features. Rounding grows with the text: scores err by about 1e-7 a, and a is all that was
        forgotten since the text started.
        """
        scaled = a * self.head_dim**0.5  # scores are divided by it
        high = scaled.to(q.dtype)
        low = (scaled - high).to(q.dtype)
        gates = torch.cat([high, low], -1)
        ones = torch.ones_like(gates)
        q = aligned(torch.cat([q, gates, ones], -1), self.head_dim + 4)
        k = aligned(torch.cat([k, ones, -gates], -1), self.head_dim + 4)
        return q, k


@assume_constant_result
def _say_kernel(*facts: Any) -> None:
    say_once(f"softmax attention by torch's {_kernel_in_use(*facts)} kernel")


@functools.cache
def _kernel_in_use(
    device: str, dtype: torch.dtype, n_head: int, n_kv_head: int, head_dim: int
) -> str:
    """Return which of torch's kernels such a model uses for whole texts, such as "flash"."""
    q = torch.zeros(1, n_head, 8, head_dim, device=device, dtype=dtype)
    kv = torch.zeros(1, n_kv_head, 8, head_dim, device=device, dtype=dtype)
    # torch has no public function for this.
    choice = torch._fused_sdp_choice(q, kv, kv, None, 0.0, True, enable_gqa=n_kv_head < n_head)
    return SDPBackend(choice).name.removesuffix("_ATTENTION").lower()
