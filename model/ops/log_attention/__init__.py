"""Attention by positive features, in linear time: log-space attention (Heinsen 2024, arXiv
2404.05843), the same over values of either sign, and linear attention (Katharopoulos et al. 2020).

One function, several implementations of the same numbers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from model.ops.custom import accumulation_dtype, assume_constant_result
from model.ops.gates import check_gates
from model.ops.kernels import choose_backend, why_not_triton
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
    "naive": partial(naive_log_attention, return_state=True),
    "chunked": chunked_log_attention,
    "triton": _triton_log_attention,
}
"""Forms of causal attention: (q, k, log_v, log_f, form=, state=) -> log_y, and the state after."""


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
        ValueError: shapes do not fit, a gate is above 0 (checked on CPUs), or the backend does not
            exist or does not run here.
    """
    _check_shapes(q, k, log_v, log_f, state, causal)
    if log_f is not None and not torch.compiler.is_compiling():
        check_gates("log_f", log_f)
    state = empty_state(q, log_v) if state is None else state.to(accumulation_dtype(q))
    if causal:
        log_y, after = _attend_causally(q, k, log_v, log_f, form, state, backend)
    elif backend == "naive":
        options: Any = {"causal": False, "state": state, "return_state": True}
        log_y, after = naive_log_attention(q, k, log_v, form=form, **options)
    else:
        # Two causal passes: the first sums all keys into a state, and queries without keys see it.
        no_queries = torch.zeros_like(k)
        _, after = _attend_causally(no_queries, k, log_v, None, form, state, backend)
        no_keys = torch.full_like(q, -torch.inf)
        no_values = log_v.new_zeros(*q.shape[:3], log_v.shape[3])
        log_y, _ = _attend_causally(q, no_keys, no_values, None, form, after, backend)
    return (log_y, after) if return_state else log_y


def _attend_causally(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None,
    form: Form,
    state: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if backend == "auto" and q.shape[2] == 1 and not torch.is_grad_enabled():
        return log_attention_step(q, k, log_v, log_f, form=form, state=state)
    backend = choose_backend("log attention", backend, [*BACKENDS], q, _why_not_triton)
    log_y, after = BACKENDS[backend](q, k, log_v, log_f, form=form, state=state)
    return log_y, after


@assume_constant_result
def _why_not_triton(device: str, index: int | None, dtype: torch.dtype, d_k: int) -> str | None:
    """Return why the kernels cannot run, or None if they can."""
    reason = why_not_triton(device, index, dtype)
    if reason is not None:
        return reason
    if d_k > 128:
        return f"supports up to 128 key features a head, not {d_k}: use more heads"
    return None


def _check_shapes(
    q: Tensor, k: Tensor, log_v: Tensor, log_f: Tensor | None, state: Tensor | None, causal: bool
) -> None:
    *batch, T, d_k = q.shape
    S, d_v = log_v.shape[-2:]
    fits = len(batch) == 2 and (T == S or not causal)
    fits = fits and k.shape == (*batch, S, d_k) and log_v.shape == (*batch, S, d_v)
    if log_f is not None:
        fits = fits and causal and log_f.shape == (*batch, T, 1)
    if state is not None:
        fits = fits and state.shape == (*batch, d_k, d_v + 1)
    if not fits:
        inputs = {"q": q, "k": k, "log_v": log_v, "log_f": log_f, "state": state}
        shapes = [f"{name} {tuple(x.shape)}" for name, x in inputs.items() if x is not None]
        raise ValueError(
            f"{', '.join(shapes)} do not fit: need (B, H, T, d_k), (B, H, S, d_k), (B, H, S, d_v), "
            "(B, H, T, 1) and (B, H, d_k, d_v + 1); causal attention has S = T, and log_f needs it"
        )
