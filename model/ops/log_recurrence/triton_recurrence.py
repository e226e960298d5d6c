"""The position recurrence by GPU kernels: one reads all tokens forward and one backward, each value
once.

A program computes some features of a sequence, some tokens at a time, with a parallel scan. What is
carried from these to the next is in float64. chunked_recurrence.py has the formulas.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.triton_launch import launching

# Of a program at a time.
_TOKENS = 32
_FEATURES = 32


def forward(log_p: Tensor, h: Tensor, start: Tensor) -> Tensor:
    """As in chunked_recurrence.py, for tensors with any strides."""
    s = torch.empty(h.shape, dtype=start.dtype, device=h.device)
    _launch(recurrence_forward, log_p, h, start=start.contiguous(), s=s)
    return s


def backward(
    g_s: Tensor, log_p: Tensor, h: Tensor, start: Tensor, s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As in chunked_recurrence.py, for tensors with any strides."""
    g_p = log_p.new_empty(log_p.shape)
    g_h = h.new_empty(h.shape)
    g_start = start.new_empty(start.shape)
    _launch(
        recurrence_backward,
        log_p,
        h,
        start=start.contiguous(),
        s=s,
        g_s=g_s.contiguous(),
        g_p=g_p,
        g_h=g_h,
        g_start=g_start,
    )
    return g_p, g_h, g_start


def _launch(kernel: Any, log_p: Tensor, h: Tensor, **others: Tensor) -> None:
    """Launch a kernel for all sequences and blocks of features."""
    if log_p.stride(-1) != 1:
        log_p = log_p.contiguous()
    if h.stride(-1) != 1:
        h = h.contiguous()
    B, T, D = h.shape
    block = min(_FEATURES, triton.next_power_of_2(D))
    with launching(h):
        kernel[B, triton.cdiv(D, block)](
            log_p=log_p,
            h=h,
            **others,
            T=T,
            D=D,
            p_batch=log_p.stride(0),
            p_token=log_p.stride(1),
            h_batch=h.stride(0),
            h_token=h.stride(1),
            ACC=tl.float64 if others["s"].dtype == torch.float64 else tl.float32,
            C=_TOKENS,
            BD=block,
            num_warps=4,
        )


@triton.jit
def _logaddexp(x, y):
    """log(exp(x) + exp(y)), which of two infinities of the same sign is that infinity."""
    gap = tl.where(x == y, 0.0, tl.abs(x - y))
    return tl.maximum(x, y) + tl.log(1.0 + tl.exp(-gap))


@triton.jit
def _join_logs(A, s, log_p, h):
    """Logarithms of what two adjacent runs of tokens keep, and of their sum from an empty one."""
    return A + log_p, _logaddexp(s + log_p, h)


@triton.jit
def _join(a, r, share, g):
    """For a linear recurrence: the product of two runs' shares, and the sum of both runs."""
    return a * share, r * share + g


@triton.jit
def _last_row(x, C: tl.constexpr):
    """The last row of x (C, BD), in float64."""
    return tl.sum(tl.where((tl.arange(0, C) == C - 1)[:, None], x, 0.0), 0).to(tl.float64)


@triton.jit(do_not_specialize=["T"])
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
    b = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    # s before these tokens.
    carried = tl.load(start + b * D + d, mask=d < D, other=0.0).to(tl.float64)
    for first in range(0, T, C):
        t = first + tl.arange(0, C).to(tl.int64)[:, None]
        known = (t < T) & (d < D)[None, :]
        p = tl.load(log_p + b * p_batch + t * p_token + d[None, :], mask=known, other=0.0).to(ACC)
        x = tl.load(h + b * h_batch + t * h_token + d[None, :], mask=known, other=float("-inf"))
        x = x.to(ACC)
        A, local = tl.associative_scan((p, x), 0, _join_logs)
        joined = _logaddexp(local, A + carried.to(ACC)[None, :])
        tl.store(s + (b * T + t) * D + d[None, :], joined, mask=known)
        carried = _logaddexp(_last_row(local, C), tl.sum(p.to(tl.float64), 0) + carried)


@triton.jit(do_not_specialize=["T"])
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
    # Pointers to these features of a sequence.
    b = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    s_start = tl.load(start + b * D + d, mask=d < D, other=0.0)
    log_p = log_p + b * p_batch + d[None, :]
    h = h + b * h_batch + d[None, :]
    dense = b * T * D + d[None, :]
    # The gradient of s at the token after these, and its s: infinity, so that nothing after the
    # last token counts.
    later = tl.zeros([BD], tl.float64)
    s_later = tl.full([BD], float("inf"), tl.float64)
    for behind in range(0, T, C):
        # Load C tokens, from the last one to the first: g, s_t, s_{t+1} and log_p_{t+1}.
        t = T - 1 - behind - tl.arange(0, C).to(tl.int64)[:, None]
        known = (t >= 0) & (d < D)[None, :]
        followed = known & (t < T - 1)
        g = tl.load(g_s + dense + t * D, mask=known, other=0.0)
        now = tl.load(s + dense + t * D, mask=known, other=0.0)
        after = tl.load(s + dense + (t + 1) * D, mask=followed, other=0.0)
        p_after = tl.load(log_p + (t + 1) * p_token, mask=followed, other=0.0).to(ACC)
        # The gradient of s_t through all later tokens: a scan, and what comes from behind these.
        share = tl.where(followed, tl.exp(p_after + now - after), 0.0)  # of s_t in s_{t+1}
        weight, local = tl.associative_scan((share, g), 0, _join)
        g = local + weight * later.to(ACC)[None, :]
        # Gradients of log_p, of h, and of the state before the first token.
        before = tl.load(s + dense + (t - 1) * D, mask=known & (t > 0), other=0.0)
        before = tl.where(t > 0, before, s_start[None, :])
        p = tl.load(log_p + t * p_token, mask=known, other=0.0).to(ACC)
        p_gradient = g * tl.exp(p + before - now)
        x = tl.load(h + t * h_token, mask=known, other=0.0).to(ACC)
        x_gradient = g * tl.exp(x - now)
        tl.store(g_p + dense + t * D, p_gradient, mask=known)
        tl.store(g_h + dense + t * D, x_gradient, mask=known)
        tl.store(g_start + b * D + d[None, :] + 0 * t, p_gradient, mask=known & (t == 0))
        # Carry the gradient at the first of these tokens to those before, in float64.
        s_first = _last_row(now, C)
        across = tl.exp(tl.sum(p_after.to(tl.float64), 0) + s_first - s_later)
        later = _last_row(local, C) + across * later
        s_later = s_first
