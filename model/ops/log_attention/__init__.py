"""Log-space attention (Heinsen 2024, arXiv 2404.05843): one function, several implementations of
the same numbers."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model.ops.custom import assume_constant_result
from model.ops.gates import check_gates
from model.ops.kernels import choose_form, why_not_triton
from model.ops.log_attention.chunked import chunked_log_attention
from model.ops.log_attention.naive import log_attention_step, naive_log_attention
from model.ops.log_attention.state import LogAttentionState, empty_state

__all__ = [
    "BACKENDS",
    "LogAttentionState",
    "log_attention",
    "naive_log_attention",
    "split_signs",
]


def _triton_log_attention(*inputs: Any, **options: Any) -> Any:
    # Importing triton is slow, and it may be missing.
    from model.ops.log_attention.triton import triton_log_attention

    return triton_log_attention(*inputs, **options)


BACKENDS: dict[str, Callable[..., Any]] = {
    "naive": naive_log_attention,
    "chunked": chunked_log_attention,
    "triton": _triton_log_attention,
}


def log_attention(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None = None,
    *,
    causal: bool = True,
    state: LogAttentionState | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, LogAttentionState]:
    """Softmax attention with similarity log(exp(q) exp(k)^T) over values exp(log_v), all in log
    space.

        log_y[t, e] = LSE_d( q[t, d] + LSE_j(k[j, d] + log_v[j, e]) ) - LSE_d( q[t, d] + LSE_j(k[j,
        d]) )

    with j <= t where causal (paper, eqs. 4-6), so exp(log_y) is a convex mixture of the values
    exp(log_v). With gates, token t sees k[j] + log_f[j + 1] + ... + log_f[t] in place of k[j]:
    earlier keys are forgotten.

    Args:
        q: (B, H, T, d_k).
        k: (B, H, S, d_k). -inf masks a key's feature.
        log_v: (B, H, S, d_v), logarithms of the values; -inf is a value of exactly zero.
        log_f: (B, H, T, 1), gates: logarithms of the share that a head keeps of the tokens before
            t, at most 0. -inf is a reset. None keeps everything.
        causal: query t sees keys j <= t of this call (so S = T), and all that `state` has seen.
        state: the state after earlier tokens; None before the first.
        return_state: also return the state after these tokens. Its size is constant.
        backend: "auto", or one of BACKENDS. "auto" uses `log_attention_step` for a single causal
            token without gradients, "triton" on GPUs, and "chunked" elsewhere.

    Returns:
        log_y (B, H, T, d_v) in the type of log_v, or (log_y, state). Sums are kept in float32, or
        float64 for float64. On GPUs, products have the precision of q and k.

    Raises:
        ValueError: shapes do not match, a gate is above 0 (checked on CPUs), or the backend does
            not exist or does not support these inputs.
    """
    _check_shapes(q, k, log_v, state, causal)
    if log_f is not None:
        if not causal:
            raise ValueError(
                "log_f needs causal=True: without an order of tokens none is earlier than another"
            )
        check_gates(log_f, q)
    if not causal:
        return _full_log_attention(q, k, log_v, state, return_state, backend)
    if backend == "auto" and q.shape[2] == 1 and not torch.is_grad_enabled():
        if state is None:
            state = empty_state(q, log_v)
        return log_attention_step(q, k, log_v, log_f, state=state, return_state=return_state)
    backend = choose_form("log attention", backend, [*BACKENDS], q, why_not=_why_not_triton)
    return BACKENDS[backend](q, k, log_v, log_f, state=state, return_state=return_state)


def _full_log_attention(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    state: LogAttentionState | None,
    return_state: bool,
    backend: str,
) -> Tensor | tuple[Tensor, LogAttentionState]:
    """`log_attention` with causal=False."""
    if backend == "naive":
        return naive_log_attention(
            q, k, log_v, causal=False, state=state, return_state=return_state
        )
    # Two causal passes: the first sums all keys into a state, and queries without keys then see it.
    options: Any = {"return_state": True, "backend": backend}
    _, state = log_attention(torch.zeros_like(k), k, log_v, state=state, **options)
    no_keys = torch.full_like(q, -torch.inf)
    no_values = log_v.new_zeros(*q.shape[:3], log_v.shape[3])
    log_y, _ = log_attention(q, no_keys, no_values, state=state, **options)
    return (log_y, state) if return_state else log_y


def split_signs(log_abs_v: Tensor, sign_v: Tensor) -> Tensor:
    """(B, H, S, d_v) twice -> log_v (B, H, S, 2 d_v): positive values, then negative ones; -inf for
    the others."""
    has_sign = torch.stack([sign_v > 0, sign_v < 0], dim=-2)  # (B, H, S, 2, d_v)
    return torch.where(has_sign, log_abs_v.unsqueeze(-2), -torch.inf).flatten(-2)


@assume_constant_result
def _why_not_triton(device: str, index: int | None, dtype: torch.dtype, d_k: int) -> str | None:
    """Return why the kernels cannot run, or None if they can."""
    reason = why_not_triton(device, index, dtype)
    if reason is not None:
        return reason
    if d_k > 128:
        return f"supports up to 128 key features a head, not {d_k}: use more heads"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    gpu = torch.cuda.get_device_properties(index)
    # Wider types need more shared memory, which most GPUs have less of: docs/kernels.md.
    limit = 128 if dtype == torch.bfloat16 or gpu.major in (9, 10) else 64
    if d_k > limit:
        supports = f"supports up to {limit} key features a head in {dtype} on {gpu.name}"
        return f"{supports}, not {d_k}: use bfloat16"
    return None


def _check_shapes(
    q: Tensor, k: Tensor, log_v: Tensor, state: LogAttentionState | None, causal: bool
) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, log_v {tuple(log_v.shape)}"
    fits = q.dim() == k.dim() == log_v.dim() == 4
    if fits:
        same_heads = q.shape[:2] == k.shape[:2] == log_v.shape[:2]
        fits = same_heads and q.shape[3] == k.shape[3] and k.shape[2] == log_v.shape[2]
    if not fits:
        raise ValueError(f"{shapes} do not match (B, H, T, d_k), (B, H, S, d_k), (B, H, S, d_v)")
    if 0 in q.shape or 0 in log_v.shape:
        raise ValueError(f"{shapes}: every dimension must be at least 1")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{shapes}: causal attention needs as many queries as keys; pass causal=False for T "
            "!= S"
        )
    if state is not None:
        log_s = tuple(state.log_s.shape)
        log_z = tuple(state.log_z.shape)
        expected_z = (*q.shape[:2], q.shape[3])
        expected_s = (*expected_z, log_v.shape[3])
        if (log_s, log_z) != (expected_s, expected_z):
            raise ValueError(
                f"state has log_s {log_s} and log_z {log_z}: "
                f"for {shapes} they must be {expected_s} and {expected_z}"
            )
