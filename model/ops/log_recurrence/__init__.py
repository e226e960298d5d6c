"""The published model's position encoding: a log-space recurrence with forgetting, for each feature."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from model.ops.kernels import Check, choose_backend
from model.ops.log_recurrence.chunked import chunked_log_recurrence
from model.ops.log_recurrence.naive import naive_log_recurrence

__all__ = ["BACKENDS", "log_recurrence", "naive_log_recurrence"]


def _triton_log_recurrence(log_p: Tensor, h: Tensor, **options: Any) -> Any:
    from model.ops.log_recurrence.triton import triton_log_recurrence  # importing triton is slow, and it may be missing

    return triton_log_recurrence(log_p, h, **options)


BACKENDS: dict[str, Callable[..., Any]] = {
    "naive": naive_log_recurrence,
    "chunked": chunked_log_recurrence,
    "triton": _triton_log_recurrence,
}


def _check() -> Check:
    from model.ops.log_recurrence.check import check  # only GPUs need it

    return check


def log_recurrence(
    log_p: Tensor, h: Tensor, *, state: Tensor | None = None, return_state: bool = False, backend: str = "auto"
) -> Tensor | tuple[Tensor, Tensor]:
    """s_t = log(p_t exp(s_{t-1}) + exp(h_t)), elementwise, from s_0 = 0 (Heinsen 2024's model, section 3).

    Args:
        log_p: (B, T, D), logarithm of the share that is kept, at most 0; -inf keeps nothing, and s_t = h_t.
        h: (B, T, D), logarithm of what is added.
        state: (B, D), s before the first token; None is zeros.
        return_state: also return s after the last token.
        backend: "auto", or one of BACKENDS. "auto" uses "triton" on GPUs that support it, and "chunked" elsewhere.

    Returns:
        s (B, T, D) in the type of h, or (s, state), the state in float32 or float64.

    Raises:
        ValueError: shapes do not match, or the backend does not exist or is not supported here.
    """
    if log_p.shape != h.shape or h.dim() != 3 or 0 in h.shape:
        raise ValueError(f"log_p {tuple(log_p.shape)} and h {tuple(h.shape)} must both be (B, T, D), with T at least 1")
    if state is not None and state.shape != h[:, 0].shape:
        raise ValueError(f"state {tuple(state.shape)} must be (B, D) = {tuple(h[:, 0].shape)}")
    backend = choose_backend("the log recurrence", _check, backend, BACKENDS, h)
    return BACKENDS[backend](log_p, h, state=state, return_state=return_state)
