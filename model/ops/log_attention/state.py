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


def add_states(
    first: LogAttentionState, second: LogAttentionState, log_f_of_second: Tensor | None
) -> LogAttentionState:
    """Combine the states of adjacent tokens, each computed from an empty state.

    Args:
        log_f_of_second: (B, H, 1), the sum of log_f over the tokens of `second`; None: nothing is
            forgotten.
    """
    log_s, log_z = first
    if log_f_of_second is not None:
        log_s = log_s + log_f_of_second.unsqueeze(-1)
        log_z = log_z + log_f_of_second
    return LogAttentionState(
        torch.logaddexp(log_s, second.log_s), torch.logaddexp(log_z, second.log_z)
    )


def empty_state(q: Tensor, log_v: Tensor) -> LogAttentionState:
    """The state before the first token, for queries (B, H, T, d_k) and values (B, H, S, d_v)."""
    B, H, _, d_k = q.shape
    log_z = q.new_full((B, H, d_k), -torch.inf, dtype=accumulation_dtype(q))
    log_s = log_z.new_full((B, H, d_k, log_v.shape[-1]), -torch.inf)
    return LogAttentionState(log_s, log_z)
