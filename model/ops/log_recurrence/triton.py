"""The position recurrence by GPU kernels: one reads all tokens forward and one backward, each value once.

A program computes some features of a sequence, some tokens at a time, with a parallel scan. What is carried from these
to the next is in float64, as in chunked.py, whose docstring has the formulas.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.derivatives import refuse_transforms
from model.ops.log_recurrence.chunked import NAMES, differentiate

_TOKENS, _FEATURES = 32, 32  # of a program at a time


def triton_log_recurrence(
    log_p: Tensor, h: Tensor, *, state: Tensor | None = None, return_state: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """As `log_recurrence`, for tensors with any strides."""
    refuse_transforms(*NAMES, log_p, h, *([] if state is None else [state]))
    acc = torch.promote_types(h.dtype, torch.float32)
    start = h.new_zeros(h[:, 0].shape, dtype=acc) if state is None else state.to(acc).contiguous()
    s = _recur(log_p, h, start)
    return (s.to(h.dtype), s[:, -1].clone()) if return_state else s.to(h.dtype)


@torch.library.custom_op("log_gpt::log_recurrence_triton", mutates_args=())
def _recur(log_p: Tensor, h: Tensor, start: Tensor) -> Tensor:
    """log_p (B, T, D), h (B, T, D), start (B, D) -> s (B, T, D) in the type of start."""
    log_p, h, s = _dense(log_p), _dense(h), _empty_s(log_p, h, start)
    with torch.cuda.device_of(h):  # kernels are launched on the current device
        recurrence_forward[_grid(h)](log_p, h, start, s, *_shape(log_p, h), **_constants(s))
    return s


@_recur.register_fake
def _empty_s(log_p: Tensor, h: Tensor, start: Tensor) -> Tensor:
    return h.new_empty(h.shape, dtype=start.dtype)


@torch.library.custom_op("log_gpt::log_recurrence_triton_backward", mutates_args=())
def _recur_backward(g_s: Tensor, log_p: Tensor, h: Tensor, start: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of log_p, h and start, given the gradient of s."""
    g_s, log_p, h = g_s.contiguous(), _dense(log_p), _dense(h)
    gradients = _empty_gradients(g_s, log_p, h, start, s)
    with torch.cuda.device_of(h):
        recurrence_backward[_grid(h)](g_s, log_p, h, start, s, *gradients, *_shape(log_p, h), **_constants(s))
    return gradients


@_recur_backward.register_fake
def _empty_gradients(g_s: Tensor, log_p: Tensor, h: Tensor, start: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return log_p.new_empty(log_p.shape), h.new_empty(h.shape), start.new_empty(start.shape)


differentiate(_recur, _recur_backward)


def _dense(x: Tensor) -> Tensor:
    """The tensor, with a dense last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _shape(log_p: Tensor, h: Tensor) -> tuple[int, ...]:
    return *h.shape[1:], *log_p.stride()[:2], *h.stride()[:2]


def _features(D: int) -> int:
    return min(_FEATURES, triton.next_power_of_2(D))


def _grid(h: Tensor) -> tuple[int, int]:
    B, _, D = h.shape
    return B, triton.cdiv(D, _features(D))


def _constants(s: Tensor) -> dict[str, Any]:
    acc = tl.float64 if s.dtype == torch.float64 else tl.float32
    return {"ACC": acc, "C": _TOKENS, "BD": _features(s.shape[2]), "num_warps": 4}


@triton.jit
def _logaddexp(x, y):
    """log(exp(x) + exp(y)), which of two infinities of the same sign is that infinity."""
    gap = tl.where(x == y, 0.0, tl.abs(x - y))
    return tl.maximum(x, y) + tl.log(1.0 + tl.exp(-gap))


@triton.jit
def _join_logs(A, s, log_p, h):
    """What two adjacent stretches keep, in logarithms, and the value after both from an empty sum."""
    return A + log_p, _logaddexp(s + log_p, h)


@triton.jit
def _join(a, r, share, g):
    """The same for a linear recurrence: the product of the shares, and the value after both stretches."""
    return a * share, r * share + g


@triton.jit
def _last_row(x, C: tl.constexpr):
    """The last row of x (C, BD), in float64."""
    return tl.sum(tl.where((tl.arange(0, C) == C - 1)[:, None], x, 0.0), 0).to(tl.float64)


@triton.jit
def recurrence_forward(
    log_p,
    h,
    start,
    s,
    T,
    D,
    p_batch,
    p_token,
    h_batch,
    h_token,
    ACC: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
):
    b, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)
    carried = tl.load(start + b * D + d, mask=d < D, other=0.0).to(tl.float64)  # s before these tokens
    for first in range(0, T, C):
        t = first + tl.arange(0, C).to(tl.int64)[:, None]
        known = (t < T) & (d < D)[None, :]
        p = tl.load(log_p + b * p_batch + t * p_token + d[None, :], mask=known, other=0.0).to(ACC)
        x = tl.load(h + b * h_batch + t * h_token + d[None, :], mask=known, other=float("-inf")).to(ACC)
        A, local = tl.associative_scan((p, x), 0, _join_logs)
        joined = _logaddexp(local, A + carried.to(ACC)[None, :])
        tl.store(s + (b * T + t) * D + d[None, :], joined, mask=known)
        carried = _logaddexp(_last_row(local, C), tl.sum(p.to(tl.float64), 0) + carried)


@triton.jit
def recurrence_backward(
    g_s,
    log_p,
    h,
    start,
    s,
    g_p,
    g_h,
    g_start,
    T,
    D,
    p_batch,
    p_token,
    h_batch,
    h_token,
    ACC: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
):
    b, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)
    s_start = tl.load(start + b * D + d, mask=d < D, other=0.0)
    log_p, h = log_p + b * p_batch + d[None, :], h + b * h_batch + d[None, :]
    dense = b * T * D + d[None, :]
    # The gradient that reaches the token after these, and its s: infinity, so that nothing after the last token counts.
    later, s_later = tl.zeros([BD], tl.float64), tl.full([BD], float("inf"), tl.float64)
    for behind in range(0, T, C):
        t = T - 1 - behind - tl.arange(0, C).to(tl.int64)[:, None]  # from the last token to the first
        known = (t >= 0) & (d < D)[None, :]
        followed = known & (t < T - 1)
        g = tl.load(g_s + dense + t * D, mask=known, other=0.0)
        now = tl.load(s + dense + t * D, mask=known, other=0.0)
        after = tl.load(s + dense + (t + 1) * D, mask=followed, other=0.0)
        p_after = tl.load(log_p + (t + 1) * p_token, mask=followed, other=0.0).to(ACC)
        share = tl.where(followed, tl.exp(p_after + now - after), 0.0)  # of s_t in s_{t+1}
        weight, local = tl.associative_scan((share, g), 0, _join)
        g = local + weight * later.to(ACC)[None, :]

        before = tl.where(t > 0, tl.load(s + dense + (t - 1) * D, mask=known & (t > 0), other=0.0), s_start[None, :])
        of_p = g * tl.exp(tl.load(log_p + t * p_token, mask=known, other=0.0).to(ACC) + before - now)
        of_h = g * tl.exp(tl.load(h + t * h_token, mask=known, other=0.0).to(ACC) - now)
        tl.store(g_p + dense + t * D, of_p, mask=known)
        tl.store(g_h + dense + t * D, of_h, mask=known)
        tl.store(g_start + b * D + d[None, :] + 0 * t, of_p, mask=known & (t == 0))

        s_first = _last_row(now, C)
        across = tl.exp(tl.sum(p_after.to(tl.float64), 0) + s_first - s_later)
        later, s_later = _last_row(local, C) + across * later, s_first
