"""The state of log-space attention: two log-sums of constant size."""

from typing import NamedTuple

import torch
from torch import Tensor

from model.ops.custom import accumulation_dtype


class LogAttentionState(NamedTuple):
    """The inner log-sum-exps of the paper's eqs. 4-6 over all tokens so far; -inf if empty."""

    log_s: Tensor
    """(B, H, d_k, d_v): LSE_j(k[j, d] + log_v[j, e]), float32 or float64."""
    log_z: Tensor
    """(B, H, d_k): LSE_j(k[j, d]), float32 or float64."""


def empty_state(q: Tensor, log_v: Tensor) -> LogAttentionState:
    """The state before the first token, for queries (B, H, T, d_k) and values (B, H, S, d_v)."""
    B, H, _, d_k = q.shape
    log_z = q.new_full((B, H, d_k), -torch.inf, dtype=accumulation_dtype(q))
    log_s = log_z.new_full((B, H, d_k, log_v.shape[-1]), -torch.inf)
    return LogAttentionState(log_s, log_z)
