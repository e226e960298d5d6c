"""The state of log-space attention: two log-sums of constant size."""

from typing import NamedTuple

import torch
from torch import Tensor

from model.ops.custom import accumulation_dtype


class LogAttentionState(NamedTuple):
    """The inner log-sum-exps of the paper's eqs. 4-6 over all tokens so far. Empty sums are -inf."""

    log_s: Tensor
    """(B, H, d_k, d_v): LSE_j(k[j, d] + log_v[j, e]), float32 or float64."""
    log_z: Tensor
    """(B, H, d_k): LSE_j(k[j, d]), float32 or float64."""


def merge_states(
    first: LogAttentionState, second: LogAttentionState, log_f_of_second: Tensor | None = None
) -> LogAttentionState:
    """Combine the states of two adjacent stretches of tokens, each computed from an empty state. Associative.

    Args:
        log_f_of_second: (B, H, 1), the sum of log_f over the second stretch; None: nothing is forgotten.

    Raises:
        ValueError: shapes do not match, or a gate is above 0 or NaN (checked on CPUs).
    """
    shapes = [tuple(x.shape) for x in (*first, *second)]
    if shapes[:2] != shapes[2:] or len(shapes[1]) != 3 or shapes[0][:-1] != shapes[1]:
        raise ValueError(f"states with log_s and log_z {shapes[:2]} and {shapes[2:]} do not match")
    if log_f_of_second is not None:
        if log_f_of_second.shape != (*first.log_z.shape[:2], 1):
            raise ValueError(
                f"log_f_of_second {tuple(log_f_of_second.shape)} must be {(*first.log_z.shape[:2], 1)}"
            )
        if log_f_of_second.device.type == "cpu" and not bool((log_f_of_second <= 0).all()):
            raise ValueError(
                f"log_f_of_second has a maximum of {float(log_f_of_second.max())}: it must be at most 0"
            )
    return add_states(first, second, log_f_of_second)


def add_states(
    first: LogAttentionState, second: LogAttentionState, log_f_of_second: Tensor | None
) -> LogAttentionState:
    """`merge_states` without its checks."""
    log_s, log_z = first
    if log_f_of_second is not None:
        log_s, log_z = log_s + log_f_of_second.unsqueeze(-1), log_z + log_f_of_second
    return LogAttentionState(
        torch.logaddexp(log_s, second.log_s), torch.logaddexp(log_z, second.log_z)
    )


def empty_state(q: Tensor, log_v: Tensor) -> LogAttentionState:
    """The state before the first token, for queries (B, H, T, d_k) and values (B, H, S, d_v)."""
    (B, H, _, d_k), d_v = q.shape, log_v.shape[-1]
    dtype = accumulation_dtype(q)
    log_s = torch.full((B, H, d_k, d_v), -torch.inf, dtype=dtype, device=q.device)
    log_z = torch.full((B, H, d_k), -torch.inf, dtype=dtype, device=q.device)
    return LogAttentionState(log_s, log_z)
