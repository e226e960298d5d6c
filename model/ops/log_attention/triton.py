"""Log-space attention by GPU kernels: `chunked.py` with the state on the chip, then `exact.py` for doubtful heads.

The kernels are in triton_kernels.py, those of `exact.py` in triton_exact.py; docs/kernels.md explains their design.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.derivatives import refuse_second_order, refuse_transforms
from model.ops.gates import REACH
from model.ops.log_attention.chunked import NAMES
from model.ops.log_attention.chunks import chunk_size
from model.ops.log_attention.frames import CERTAIN
from model.ops.log_attention.repair import Fallback
from model.ops.log_attention.state import LogAttentionState, accumulation_dtype
from model.ops.log_attention.triton_arguments import Constants, Found, Given, Saved, Tokens
from model.ops.log_attention.triton_exact import exact_backward, exact_forward
from model.ops.log_attention.triton_kernels import backward_sweep, forward_sweep

# Powers of two by which a frame can shrink with gates of features, which it does not count, and with those of a head.
FEW, MANY = 24, 40


def triton_log_attention(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None = None,
    *,
    causal: bool = True,
    state: LogAttentionState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LogAttentionState]:
    """As `log_attention`, for tensors with any strides; the memory layout of log_y is (B, T, H, d_v).

    Products use bfloat16 for bfloat16, tf32 (with the range of bfloat16 and the digits of float16) for float16, and
    three products of tf32 for float32. Sums are kept in float32, or float64 for float64.
    """
    acc = accumulation_dtype(q)
    log_s, log_z = (None, None) if state is None else (x.to(acc).contiguous() for x in state)
    given = [x for x in (q, k, log_v, log_f, log_s, log_z) if x is not None]
    refuse_transforms(*NAMES, *given)
    save = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    log_y, log_s, log_z, *_ = _attend(q, k, log_v, log_f, log_s, log_z, causal, return_state, save)
    return (log_y, LogAttentionState(log_s, log_z)) if return_state else log_y


@torch.library.custom_op("log_gpt::log_attention_triton", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None,
    log_s: Tensor | None,
    log_z: Tensor | None,
    causal: bool,
    want_state: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return log_y, the state after, and tensors for the backward pass: see `_empty_results`."""
    results = _empty_results(q, k, log_v, log_f, causal, want_state, save)
    log_y, log_s_after, log_z_after, M, z, key, value, doubtful = results
    given, P = _given(q, k, log_v, log_f, log_s, log_z), _constants(q, k, log_v, log_f, causal)
    found = Found(log_y, log_s_after, log_z_after) if want_state else Found(log_y, None, None)
    saved, exact = (_saved(M, z, key, value), _exact(M, z)) if save else (None, None)
    counter = Fallback.counter("forward", q.device)
    with _on(q):
        forward_sweep[_grid(q, P)](given, found, saved, doubtful, P=P, **_launch(P))
        exact_forward[_grid(q, P)](given, found, exact, doubtful, counter, P=P, num_warps=8)
    return results


@_attend.register_fake
def _(q: Tensor, k: Tensor, log_v: Tensor, log_f: Any, log_s: Any, log_z: Any, *flags: bool) -> tuple[Tensor, ...]:
    return _empty_results(q, k, log_v, log_f, *flags)


def _empty_results(
    q: Tensor, k: Tensor, log_v: Tensor, log_f: Tensor | None, causal: bool, want_state: bool, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate all results of `_attend`.

    - log_y (B, H, T, d_v), and if wanted the state's log_s (B, H, d_k, d_v) and log_z (B, H, d_k), else empty tensors.
    - To save: M (B H, slots, d_k, d_v), z and the frame of keys (B H, slots, d_k), and the frame of values
      (B H, slots, d_v). Slots are before each chunk and after the last, if not causal only the latter, rounded up to
      whole spans (see triton_exact.py).
    - (B H, tiles + 1, blocks): whether each tile of queries and the last state are doubtful, by block of value columns.
    """
    (B, H, T, d_k), (S, d_v), C = q.shape, log_v.shape[2:], chunk_size(log_f)
    G, acc = B * H, accumulation_dtype(q)
    M_dtype = _dtype_of_M(q, k, log_v)
    slots = (-(-S // C) + 1 if causal else 1) if save else 0
    slots += -slots % _span(M_dtype)
    return (
        log_v.new_empty(B, T, H, d_v).transpose(1, 2),
        q.new_empty((B, H, d_k, d_v) if want_state else 0, dtype=acc),
        q.new_empty((B, H, d_k) if want_state else 0, dtype=acc),
        q.new_empty(G, slots, d_k, d_v, dtype=M_dtype),
        q.new_empty(G, slots, d_k, dtype=acc),
        q.new_empty(G, slots, d_k, dtype=acc),
        q.new_empty(G, slots, d_v, dtype=acc),
        q.new_empty(G, -(-T // C) + 1, _value_blocks(q, k, log_v), dtype=torch.int8),
    )


@torch.library.custom_op("log_gpt::log_attention_triton_backward", mutates_args=())
def _attend_backward(
    g_y: Tensor,
    g_log_s: Tensor | None,
    g_log_z: Tensor | None,
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None,
    log_s: Tensor | None,
    log_z: Tensor | None,
    M: Tensor,
    z: Tensor,
    key: Tensor,
    value: Tensor,
    doubtful: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, k, log_v, log_f, log_s and log_z (empty for those that were not given)."""
    given, P = _given(q, k, log_v, log_f, log_s, log_z), _constants(q, k, log_v, log_f, causal)
    parts = _empty_gradients(q, k, log_v, log_f, log_s)
    to = parts if log_f is not None else parts._replace(log_f=None)
    g_of, counter = Found(_tokens(g_y), g_log_s, g_log_z), Fallback.counter("backward", q.device)
    with _on(q):
        backward_sweep[_grid(q, P)](g_of, given, _saved(M, z, key, value), doubtful, to, P=P, **_launch(P))
        exact_backward[_grid(q, P)](g_of, given, _exact(M, z), doubtful, counter, to, P=P, num_warps=8)
    return _summed(parts, q, k, log_f)


@_attend_backward.register_fake
def _(
    g_y: Any, g_s: Any, g_z: Any, q: Tensor, k: Tensor, log_v: Tensor, log_f: Any, log_s: Any, *_: Any
) -> tuple[Tensor, ...]:
    return _summed(_empty_gradients(q, k, log_v, log_f, log_s), q, k, log_f)


def _empty_gradients(q: Tensor, k: Tensor, log_v: Tensor, log_f: Tensor | None, log_s: Tensor | None) -> Given:
    """Allocate gradients of q, k (blocks, B, T, H, d_k), log_v (B, S, H, d_v), log_s and log_z (blocks, B, H, d_k).

    Each block of value columns writes its part of a sum over all values; that of log_f is (blocks, B, T, H, .).
    """
    (B, H, _, d_k), (S, d_v) = q.shape, log_v.shape[2:]
    blocks, acc = _value_blocks(q, k, log_v), accumulation_dtype(q)

    def of_sum(x: Tensor) -> Tensor:
        return x.new_empty(blocks, B, x.shape[2], H, x.shape[3], dtype=x.dtype if blocks == 1 else acc)

    return Given(
        of_sum(q),
        of_sum(k),
        log_v.new_empty(B, S, H, d_v),
        q.new_empty(1, 0) if log_f is None else of_sum(log_f),
        q.new_empty((B, H, d_k, d_v) if log_s is not None else 0, dtype=acc),
        q.new_empty((blocks, B, H, d_k) if log_s is not None else (1, 0), dtype=acc),
    )


def _summed(
    parts: Given, q: Tensor, k: Tensor, log_f: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients, in the shapes of what they belong to."""
    g_f = parts.log_f[0] if log_f is None else _whole(parts.log_f, log_f)
    g_q, g_k, g_v = _whole(parts.q, q), _whole(parts.k, k), parts.log_v.transpose(1, 2)
    return g_q, g_k, g_v, g_f, parts.log_s, parts.log_z.sum(0)


def _whole(parts: Tensor, x: Tensor) -> Tensor:
    """Sum the parts (blocks, B, T, H, d_k) of the gradient of x (B, H, T, d_k)."""
    return (parts[0] if len(parts) == 1 else parts.sum(0).to(x.dtype)).transpose(1, 2)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.causal, ctx.want_state, _ = inputs
    ctx.save_for_backward(*tensors, *output[3:])
    ctx.mark_non_differentiable(*output[3:])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, g_y: Tensor | None, g_log_s: Tensor | None, g_log_z: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    refuse_second_order(*NAMES)
    saved = ctx.saved_tensors  # read once, as torch asks where they are recomputed
    q, _, log_v, log_f, log_s, *_ = saved
    if g_y is None:
        g_y = log_v.new_zeros(1).expand(*q.shape[:3], log_v.shape[3])
    if not ctx.want_state:
        g_log_s = g_log_z = None
    elif g_log_s is not None or g_log_z is not None:
        (B, H, _, d_k), d_v = q.shape, log_v.shape[3]
        acc = accumulation_dtype(q)
        g_log_s = q.new_zeros(B, H, d_k, d_v, dtype=acc) if g_log_s is None else g_log_s.contiguous()
        g_log_z = q.new_zeros(B, H, d_k, dtype=acc) if g_log_z is None else g_log_z.contiguous()
    g_q, g_k, g_v, g_f, *g_first = _attend_backward(g_y, g_log_s, g_log_z, *saved, ctx.causal)
    of_state = (None, None) if log_s is None else g_first
    return g_q, g_k, g_v, None if log_f is None else g_f, *of_state, None, None, None


_attend.register_autograd(_backward, setup_context=_save_for_backward)


def _tokens(x: Tensor) -> Tokens:
    """A tensor (B, H, T, D) for a kernel. The last dimension is made dense if it has gaps."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return Tokens(x, x.stride()[:3])


def _given(
    q: Tensor, k: Tensor, log_v: Tensor, log_f: Tensor | None, log_s: Tensor | None, log_z: Tensor | None
) -> Given:
    of_gates = None if log_f is None else _tokens(log_f)
    return Given(_tokens(q), _tokens(k), _tokens(log_v), of_gates, log_s, log_z, q.shape[1], q.shape[2], k.shape[2])


def _saved(M: Tensor, z: Tensor, key: Tensor, value: Tensor) -> Saved:
    return Saved(M, z, key, value, M.shape[1])


def _exact(M: Tensor, z: Tensor) -> Saved:
    """View the memory of M and z as float64, the type in which exact heads store their states."""
    return Saved(M.view(-1).view(torch.float64), z.view(-1).view(torch.float64), None, None, M.shape[1])


def _operand(q: Tensor, k: Tensor, log_v: Tensor) -> torch.dtype:
    """The common type of the inputs."""
    return torch.promote_types(torch.promote_types(q.dtype, k.dtype), log_v.dtype)


def _dtype_of_M(q: Tensor, k: Tensor, log_v: Tensor) -> torch.dtype:
    """The operand type of products."""
    return torch.bfloat16 if _operand(q, k, log_v) == torch.bfloat16 else accumulation_dtype(q)


def _span(dtype: torch.dtype) -> int:
    """The number of slots that a float64 state takes."""
    return torch.float64.itemsize // dtype.itemsize


def _value_columns(q: Tensor, k: Tensor, log_v: Tensor) -> int:
    """Maximum number of columns of a program: fewer for wide types, because of the multiprocessor's shared memory."""
    if accumulation_dtype(q) == torch.float64:
        return 16
    return 64 if _operand(q, k, log_v) == torch.bfloat16 or q.shape[3] <= 64 else 32


def _value_blocks(q: Tensor, k: Tensor, log_v: Tensor) -> int:
    return -(-log_v.shape[3] // _value_columns(q, k, log_v))


def _constants(q: Tensor, k: Tensor, log_v: Tensor, log_f: Tensor | None, causal: bool) -> Constants:
    d_k, d_v, acc, operand = q.shape[3], log_v.shape[3], accumulation_dtype(q), _operand(q, k, log_v)
    BK, BV = (max(16, triton.next_power_of_2(d)) for d in (d_k, min(d_v, _value_columns(q, k, log_v))))
    C, span = chunk_size(log_f), _span(_dtype_of_M(q, k, log_v))
    shrinks = MANY if log_f is not None and log_f.shape[3] == 1 else FEW
    narrow, wide = operand == torch.bfloat16, acc == torch.float64
    return Constants(
        CAUSAL=causal,
        D_K=d_k,
        D_V=d_v,
        D_F=0 if log_f is None else log_f.shape[3],
        BK=BK,
        BV=BV,
        BLOCKS=_value_blocks(q, k, log_v),
        C=C,
        OPERAND=tl.float64 if wide else tl.bfloat16 if narrow else tl.float32,
        ACC=tl.float64 if wide else tl.float32,
        PRECISION="ieee" if wide else "tf32" if operand == torch.float16 else "tf32x3",
        STAGES=2 if narrow and d_k <= 64 else 1,
        CERTAIN=CERTAIN[acc] * 2.0 ** (shrinks - FEW),  # what a frame rounded to 0 is this much larger in the next
        REACH=REACH[acc],
        SHRINKS=shrinks,
        SPAN=span,
        Z_SPAN=_span(acc),
        PART=math.isqrt(C * span),
    )


def _launch(P: Constants) -> dict[str, int]:
    """Launch options: see docs/kernels.md. Without maxnreg, ptxas sometimes uses 32 registers and spills the rest."""
    small = P.OPERAND == tl.bfloat16 and P.D_K <= 32
    return {"num_warps": 4 if small else 8, "maxnreg": 255}


def _grid(q: Tensor, P: Constants) -> tuple[int]:
    return (q.shape[0] * q.shape[1] * P.BLOCKS,)


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of x current: kernels are launched on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
