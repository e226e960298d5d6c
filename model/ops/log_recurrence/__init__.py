"""The published model's position encoding: a log-space recurrence of each feature."""

from typing import Any

import torch
from torch import Tensor

from model.ops.custom import accumulation_dtype, operator, refuse_second_order, refuse_transforms
from model.ops.gates import check_gates
from model.ops.kernels import choose_backend
from model.ops.log_recurrence import chunked_recurrence

# The operator, and the form that has all derivatives.
NAMES = "log_recurrence", "naive_log_recurrence"


def naive_log_recurrence(
    log_p: Tensor, h: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """s_t = log(p_t exp(s_{t-1}) + exp(h_t)), s_0 = 0. Arguments and result are those of
    `log_recurrence`."""
    acc = accumulation_dtype(h)
    s = torch.zeros_like(h[:, 0], dtype=acc) if state is None else state.to(acc)
    steps = []
    for log_p_t, h_t in zip(log_p.to(acc).unbind(1), h.to(acc).unbind(1), strict=True):
        s = torch.logaddexp(log_p_t + s, h_t)
        steps.append(s)
    return torch.stack(steps, dim=1).to(h.dtype), s


def log_recurrence(
    log_p: Tensor, h: Tensor, state: Tensor | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """s_t = log(p_t exp(s_{t-1}) + exp(h_t)), elementwise, from s_0 = 0 (Heinsen 2024's model,
    section 3).

    Args:
        log_p: (B, T, D), logarithm of the share that is kept, at most 0; -inf keeps nothing, and
            s_t = h_t.
        h: (B, T, D), logarithm of what is added.
        state: (B, D), s before the first token; None is zeros.
        backend: "naive", "chunked" or "triton"; "auto" uses "triton" on GPUs that support it, and
            "chunked" elsewhere.

    Returns:
        s (B, T, D) in the type of h, and the state, which is s after the last token in float32 or
        float64.

    Raises:
        ValueError: shapes do not fit, log_p is above 0 (checked on CPUs, except by "naive"), or
            the backend does not exist or does not run here.
    """
    if log_p.shape != h.shape or (state is not None and state.shape != h[:, 0].shape):
        shapes = [tuple(x.shape) for x in (log_p, h, state) if x is not None]
        raise ValueError(f"{shapes} must be (B, T, D), (B, T, D) and, of the state, (B, D)")
    backend = choose_backend("the log recurrence", backend, ("naive", "chunked", "triton"), h)
    if backend == "naive":
        return naive_log_recurrence(log_p, h, state)
    refuse_transforms(*NAMES, log_p, h, state)
    acc = accumulation_dtype(h)
    start = torch.zeros_like(h[:, 0], dtype=acc) if state is None else state.to(acc)
    s = _recur(log_p, h, start, backend)
    return s.to(h.dtype), s[:, -1].clone()  # a view would keep the sequence in memory


@operator("log_recurrence")
def _recur(log_p: Tensor, h: Tensor, start: Tensor, backend: str) -> Tensor:
    """log_p (B, T, D), h (B, T, D), start (B, D) -> s (B, T, D) in the type of start."""
    check_gates("log_p", log_p)
    s: Tensor = _form(backend).forward(log_p, h, start)
    return s


@torch.library.register_fake(_recur)
def _(log_p: Tensor, h: Tensor, start: Tensor, backend: str) -> Tensor:
    return h.new_empty(h.shape, dtype=start.dtype)


@operator("log_recurrence_backward")
def _recur_backward(
    g_s: Tensor, log_p: Tensor, h: Tensor, start: Tensor, s: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of log_p, h and start, given the gradient of s."""
    g_p, g_h, g_start = _form(backend).backward(g_s, log_p, h, start, s)
    return g_p, g_h, g_start


@torch.library.register_fake(_recur_backward)
def _(
    g_s: Tensor, log_p: Tensor, h: Tensor, start: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return log_p.new_empty(log_p.shape), h.new_empty(h.shape), start.new_empty(start.shape)


def _form(backend: str) -> Any:
    """The module with the functions `forward` and `backward`."""
    if backend == "chunked":
        return chunked_recurrence
    # Importing triton is slow, and it may be missing.
    from model.ops.log_recurrence import triton_recurrence

    return triton_recurrence


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output)


def _backward(ctx: Any, g_s: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_order(*NAMES)
    return *_recur_backward(g_s, *ctx.saved_tensors, ctx.backend), None


torch.library.register_autograd(_recur, _backward, setup_context=_save_for_backward)
