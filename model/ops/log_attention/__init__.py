"""Attention by positive features, in linear time: log-space attention (Heinsen 2024, arXiv
2404.05843), the same over values of either sign, and linear attention (Katharopoulos et al. 2020).

One function, several implementations of the same numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model.ops.custom import assume_constant_result
from model.ops.gates import check_gates
from model.ops.kernels import choose_form, why_not_triton
from model.ops.log_attention.chunked_attention import chunked_log_attention, log_attention_step
from model.ops.log_attention.naive_attention import (
    LINEAR,
    LOG_SPACE,
    SIGNED,
    Form,
    empty_state,
    naive_log_attention,
)

__all__ = [
    "BACKENDS",
    "LINEAR",
    "LOG_SPACE",
    "SIGNED",
    "Form",
    "empty_state",
    "log_attention",
    "naive_log_attention",
]


def _triton_log_attention(*inputs: Any, **options: Any) -> Any:
    # Importing triton is slow, and it may be missing.
    from model.ops.log_attention.triton_attention import triton_log_attention

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
    form: Form = LOG_SPACE,
    causal: bool = True,
    state: Tensor | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention with similarity log(exp(q) exp(k)^T) over values exp(log_v), all in log
    space.

        log_y[t] = log( sum_j w_tj exp(log_v[j]) / sum_j w_tj )
        w_tj = exp(q[t]) exp(k[j])^T exp(log_f[j + 1] + ... + log_f[t])

    with j <= t where causal (paper, eqs. 4-6), so exp(log_y) is a convex mixture of the values
    exp(log_v). Logarithms are bounded: q counts as at least 60 below its largest feature, k as -25
    to 45, and log_v as -20 to 25 (docs/attention.md). The derivative ignores the bounds.

    Args:
        q: (B, H, T, d_k).
        k: (B, H, S, d_k). -inf masks a key's feature.
        log_v: (B, H, S, d_v), logarithms of the values, of which -inf counts as -20; the values
            themselves in other forms.
        log_f: (B, H, T, 1), gates: logarithms of the share that a head keeps of the tokens before
            t, at most 0. -inf is a reset. None keeps everything.
        form: LOG_SPACE; SIGNED, for values of either sign, which returns y; or LINEAR, the same
            with features elu(q) + 1 and elu(k) + 1.
        causal: query t sees keys j <= t of this call (so S = T), and all that `state` has seen.
        state: (B, H, d_k, d_v + 1), the state after earlier tokens; None before the first.
        return_state: also return the state after these tokens: sum_j exp(k[j])^T [exp(log_v[j]), 1]
            times what gates keep. The sum of two texts' states is the state of both.
        backend: "auto", or one of BACKENDS. "auto" uses `log_attention_step` for a single causal
            token without gradients, "triton" on GPUs, and "chunked" elsewhere.

    Returns:
        log_y (B, H, T, d_v) in the type of log_v, or (log_y, state). Sums are kept in float32, or
        float64 for float64. On GPUs, products have the precision of q and k. A query that sees no
        key has NaN. It has no gradient, nor has a query whose weights add up to less than 1e-24,
        because it sees only masked and forgotten keys.

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
    options: Any = {"form": form, "state": state, "return_state": return_state}
    if not causal:
        return _full_log_attention(q, k, log_v, backend, **options)
    if backend == "auto" and q.shape[2] == 1 and not torch.is_grad_enabled():
        return log_attention_step(q, k, log_v, log_f, **options)
    backend = choose_form("log attention", backend, [*BACKENDS], q, why_not=_why_not_triton)
    return BACKENDS[backend](q, k, log_v, log_f, **options)


def _full_log_attention(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    backend: str,
    *,
    form: Form,
    state: Tensor | None,
    return_state: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """`log_attention` with causal=False."""
    if backend == "naive":
        return naive_log_attention(
            q, k, log_v, form=form, causal=False, state=state, return_state=return_state
        )
    # Two causal passes: the first sums all keys into a state, and queries without keys then see it.
    options: Any = {"form": form, "return_state": True, "backend": backend}
    _, state = log_attention(torch.zeros_like(k), k, log_v, state=state, **options)
    no_keys = torch.full_like(q, -torch.inf)
    no_values = log_v.new_zeros(*q.shape[:3], log_v.shape[3])
    log_y, _ = log_attention(q, no_keys, no_values, state=state, **options)
    return (log_y, state) if return_state else log_y


@assume_constant_result
def _why_not_triton(device: str, index: int | None, dtype: torch.dtype, d_k: int) -> str | None:
    """Return why the kernels cannot run, or None if they can."""
    reason = why_not_triton(device, index, dtype)
    if reason is not None:
        return reason
    if d_k > 128:
        return f"supports up to 128 key features a head, not {d_k}: use more heads"
    return None


def _check_shapes(q: Tensor, k: Tensor, log_v: Tensor, state: Tensor | None, causal: bool) -> None:
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
    wanted = (*q.shape[:2], q.shape[3], log_v.shape[3] + 1)
    if state is not None and state.shape != wanted:
        raise ValueError(f"state has shape {tuple(state.shape)}: for {shapes} it must be {wanted}")
