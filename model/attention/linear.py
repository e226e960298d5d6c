"""Linear attention (Katharopoulos et al. 2020): weights are products of positive features."""

from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from model.attention.base import Forgetting, ForgettingSettings, MultiHeadAttention
from model.ops.log_attention import LINEAR, empty_state, log_attention, naive_log_attention


class LinearConfig(ForgettingSettings, defaults="model/attention/linear"):
    """Similarity phi(q)^T phi(k) with phi(x) = elu(x) + 1, in linear time."""

    name: Literal["linear"]
    constant_state: ClassVar[bool] = True

    def mechanism(self, n_embd: int, n_head: int, head_dim: int) -> "LinearAttention":
        return LinearAttention(n_embd, n_head, head_dim)


class LinearAttention(MultiHeadAttention):
    """Causal multi-head linear attention; its state is a sum over the tokens so far.

    Queries and keys are rotated before phi, so that weights stay positive and add up to 1. They do
    not if phi's result is rotated (Su et al. 2021, eq. 19).
    """

    resets = True

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        forgetting: Forgetting,
        state: Any,
        return_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        options: Any = {"form": LINEAR, "state": state, "return_state": return_state}
        result: Any = log_attention(q, k, v, forgetting.log_f, **options)
        return result if return_state else (result, None)

    def naive_attend(self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None) -> Tensor:
        return cast(Tensor, naive_log_attention(q, k, v, log_f, form=LINEAR))

    def initial_state(self, B: int, device: torch.device) -> Tensor:
        shape = B, self.n_head, 0, self.head_dim
        no_tokens = torch.empty(shape, dtype=self.qkv.weight.dtype, device=device)
        return empty_state(no_tokens, no_tokens)

    def flops_per_token(self, seq_len: int) -> int:
        return self.chunked_flops(seq_len, self.head_dim, self.head_dim)
