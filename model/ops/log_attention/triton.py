"""Log-space attention by GPU kernels: `chunked.py` with the state on the chip, then `exact.py` for doubtful heads.

The kernels are in triton_kernels.py and triton_exact.py; docs/kernels.md explains their design.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.derivatives import refuse_second_order, refuse_transforms
from model.ops.log_attention.chunked import NAMES
from model.ops.log_attention.chunks import CHUNK
from model.ops.log_attention.frames import CERTAIN
from model.ops.log_attention.repair import Fallback
from model.ops.log_attention.state import LogAttentionState, accumulation_dtype
from model.ops.log_attention.triton_exact import exact_backward, exact_forward
from model.ops.log_attention.triton_kernels import backward_sweep, forward_sweep


def triton_log_attention(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    *,
    causal: bool = True,
    state: LogAttentionState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LogAttentionState]:
    """As `log_attention`, for tensors with any strides; the memory layout of log_y is (B, T, H, d_v).

    Products use bfloat16 for bfloat16, tf32 (with the range of bfloat16 and the digits of float16) for float16, and
    three products of tf32 for float32. Sums are kept in float32, or float64 for float64.
    """
    refuse_transforms(*NAMES, q, k, log_v, *(state or ()))
    acc = accumulation_dtype(q)
    log_s, log_z = (None, None) if state is None else (x.to(acc).contiguous() for x in state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, log_v, log_s, log_z))
    log_y, log_s, log_z, *_ = _attend(q, k, log_v, log_s, log_z, causal, return_state, save)
    return (log_y, LogAttentionState(log_s, log_z)) if return_state else log_y


@torch.library.custom_op("log_gpt::log_attention_triton", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_s: Tensor | None,
    log_z: Tensor | None,
    causal: bool,
    want_state: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return log_y, the state after, and tensors for the backward pass: see `_empty_results`."""
    q, k, log_v = (_with_dense_rows(x) for x in (q, k, log_v))
    results = _empty_results(q, k, log_v, causal, want_state, save)
    log_y, log_s_after, log_z_after, M_at, z_at, key_at, value_at, doubtful = results
    arguments = q, k, log_v, log_s, log_z, log_y, log_s_after, log_z_after
    sizes = *(x.stride()[:3] for x in (q, k, log_v)), *_sizes(q, k), M_at.shape[1]
    flags = {"CAUSAL": causal, "HAS_STATE": log_s is not None, "WANT_STATE": want_state, "SAVE": save}
    with _on(q):
        forward_sweep[_grid(q, k, log_v)](
            *(*arguments, M_at, z_at, key_at, value_at, doubtful, *sizes),
            **_blocks(q, k, log_v) | _numbers(q, k, log_v) | flags | {"CERTAIN": CERTAIN[accumulation_dtype(q)]},
        )
        exact_forward[_grid(q, k, log_v)](
            *(*arguments, *_as_exact(M_at, z_at), doubtful, Fallback.counter("forward", q.device), *sizes),
            **_blocks(q, k, log_v) | flags | _spans(M_at, z_at) | {"num_warps": 8},
        )
    return results


@_attend.register_fake
def _(q: Tensor, k: Tensor, log_v: Tensor, log_s: Any, log_z: Any, *flags: bool) -> tuple[Tensor, ...]:
    return _empty_results(q, k, log_v, *flags)


def _empty_results(
    q: Tensor, k: Tensor, log_v: Tensor, causal: bool, want_state: bool, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate all results of `_attend`.

    - log_y (B, H, T, d_v), and if wanted the state's log_s (B, H, d_k, d_v) and log_z (B, H, d_k), else empty tensors.
    - To save: M (B H, slots, d_k, d_v), z and the frame of keys (B H, slots, d_k), and the frame of values
      (B H, slots, d_v). Slots are before each chunk and after the last, if not causal only the latter, rounded up to
      whole spans (see triton_exact.py).
    - (B H, tiles + 1, blocks): whether each tile of queries and the last state are doubtful, by block of value columns.
    """
    (B, H, T, d_k), (S, d_v) = q.shape, log_v.shape[2:]
    G, acc = B * H, accumulation_dtype(q)
    M_dtype = torch.bfloat16 if _operand(q, k, log_v) == torch.bfloat16 else acc  # the operand type of products
    slots = (-(-S // CHUNK) + 1 if causal else 1) if save else 0
    slots += -slots % _span(M_dtype)
    return (
        log_v.new_empty(B, T, H, d_v).transpose(1, 2),
        q.new_empty((B, H, d_k, d_v) if want_state else 0, dtype=acc),
        q.new_empty((B, H, d_k) if want_state else 0, dtype=acc),
        q.new_empty(G, slots, d_k, d_v, dtype=M_dtype),
        q.new_empty(G, slots, d_k, dtype=acc),
        q.new_empty(G, slots, d_k, dtype=acc),
        q.new_empty(G, slots, d_v, dtype=acc),
        q.new_empty(G, -(-T // CHUNK) + 1, _value_blocks(q, k, log_v), dtype=torch.int8),
    )


@torch.library.custom_op("log_gpt::log_attention_triton_backward", mutates_args=())
def _attend_backward(
    g_y: Tensor,
    g_log_s_after: Tensor | None,
    g_log_z_after: Tensor | None,
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_s: Tensor | None,
    log_z: Tensor | None,
    M_at: Tensor,
    z_at: Tensor,
    key_at: Tensor,
    value_at: Tensor,
    doubtful: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, k, log_v, log_s and log_z (the last two empty without a state)."""
    q, k, log_v, g_y = (_with_dense_rows(x) for x in (q, k, log_v, g_y))
    g_q, g_k, g_v, g_log_s, g_log_z = parts = _empty_gradients(q, k, log_v, log_s)
    arguments = g_y, g_log_s_after, g_log_z_after, q, k, log_v, log_s, log_z
    sizes = *(x.stride()[:3] for x in (g_y, q, k, log_v)), *_sizes(q, k), M_at.shape[1]
    flags = {"CAUSAL": causal, "HAS_STATE": log_s is not None, "WANT_STATE": g_log_s_after is not None}
    spans = _spans(M_at, z_at)
    with _on(q):
        backward_sweep[_grid(q, k, log_v)](
            *(*arguments, M_at, z_at, key_at, value_at, doubtful, *parts, *sizes),
            **_blocks(q, k, log_v) | _numbers(q, k, log_v) | flags,
        )
        exact_backward[_grid(q, k, log_v)](
            *(*arguments, *_as_exact(M_at, z_at), doubtful, Fallback.counter("backward", q.device), *parts, *sizes),
            **_blocks(q, k, log_v) | flags | spans | {"R": math.isqrt(CHUNK * spans["SPAN"]), "num_warps": 8},
        )
    return _whole(g_q, q), _whole(g_k, k), g_v.transpose(1, 2), g_log_s, g_log_z.sum(0)


@_attend_backward.register_fake
def _(g_y: Any, g_s: Any, g_z: Any, q: Tensor, k: Tensor, log_v: Tensor, log_s: Any, *_: Any) -> tuple[Tensor, ...]:
    g_q, g_k, g_v, g_log_s, g_log_z = _empty_gradients(q, k, log_v, log_s)
    return _whole(g_q, q), _whole(g_k, k), g_v.transpose(1, 2), g_log_s, g_log_z.sum(0)


def _empty_gradients(q: Tensor, k: Tensor, log_v: Tensor, log_s: Tensor | None) -> tuple[Tensor, ...]:
    """Allocate gradients of q and k (blocks, B, T, H, d_k), log_v (B, S, H, d_v), log_s and log_z (blocks, B, H, d_k).

    Each block of value columns writes its part of a sum over all values.
    """
    (B, H, T, d_k), (S, d_v) = q.shape, log_v.shape[2:]
    blocks, acc = _value_blocks(q, k, log_v), accumulation_dtype(q)
    return (
        q.new_empty(blocks, B, T, H, d_k, dtype=q.dtype if blocks == 1 else acc),
        k.new_empty(blocks, B, S, H, d_k, dtype=k.dtype if blocks == 1 else acc),
        log_v.new_empty(B, S, H, d_v),
        q.new_empty((B, H, d_k, d_v) if log_s is not None else 0, dtype=acc),
        q.new_empty((blocks, B, H, d_k) if log_s is not None else (1, 0), dtype=acc),
    )


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
    q, k, log_v, log_s, log_z, *saved = ctx.saved_tensors
    if g_y is None:
        g_y = log_v.new_zeros(1).expand(*q.shape[:3], log_v.shape[3])
    if not ctx.want_state:
        g_log_s = g_log_z = None
    elif g_log_s is not None or g_log_z is not None:
        (B, H, _, d_k), d_v = q.shape, log_v.shape[3]
        acc = accumulation_dtype(q)
        g_log_s = q.new_zeros(B, H, d_k, d_v, dtype=acc) if g_log_s is None else g_log_s.contiguous()
        g_log_z = q.new_zeros(B, H, d_k, dtype=acc) if g_log_z is None else g_log_z.contiguous()
    g_q, g_k, g_v, g_first_s, g_first_z = _attend_backward(
        g_y, g_log_s, g_log_z, q, k, log_v, log_s, log_z, *saved, ctx.causal
    )
    of_state = (None, None) if log_s is None else (g_first_s, g_first_z)
    return g_q, g_k, g_v, *of_state, None, None, None


_attend.register_autograd(_backward, setup_context=_save_for_backward)


def _with_dense_rows(x: Tensor) -> Tensor:
    """Make the last dimension dense if it has gaps."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _operand(q: Tensor, k: Tensor, log_v: Tensor) -> torch.dtype:
    """The common type of the inputs."""
    return torch.promote_types(torch.promote_types(q.dtype, k.dtype), log_v.dtype)


def _value_columns(q: Tensor, k: Tensor, log_v: Tensor) -> int:
    """Maximum number of columns of a program: fewer for wide types, because of the multiprocessor's shared memory."""
    if accumulation_dtype(q) == torch.float64:
        return 16
    return 64 if _operand(q, k, log_v) == torch.bfloat16 or q.shape[3] <= 64 else 32


def _value_blocks(q: Tensor, k: Tensor, log_v: Tensor) -> int:
    return -(-log_v.shape[3] // _value_columns(q, k, log_v))


def _grid(q: Tensor, k: Tensor, log_v: Tensor) -> tuple[int]:
    return (q.shape[0] * q.shape[1] * _value_blocks(q, k, log_v),)


def _blocks(q: Tensor, k: Tensor, log_v: Tensor) -> dict[str, int]:
    """Sizes as compile-time constants: dimensions of products are powers of two, and at least 16."""
    d_k, d_v = q.shape[3], log_v.shape[3]
    BK, BV = (max(16, triton.next_power_of_2(d)) for d in (d_k, min(d_v, _value_columns(q, k, log_v))))
    return {"D_K": d_k, "D_V": d_v, "BK": BK, "BV": BV, "C": CHUNK}


def _numbers(q: Tensor, k: Tensor, log_v: Tensor) -> dict[str, Any]:
    """Types of operands and sums, and launch options: see docs/kernels.md."""
    if accumulation_dtype(q) == torch.float64:
        types = {"OPERAND": tl.float64, "ACC": tl.float64, "PRECISION": "ieee"}
        return types | {"STAGES": 1, "num_warps": 8, "maxnreg": 255}
    narrow, small = _operand(q, k, log_v) == torch.bfloat16, q.shape[3] <= 32
    return {
        "OPERAND": tl.bfloat16 if narrow else tl.float32,
        "ACC": tl.float32,
        "PRECISION": "tf32" if _operand(q, k, log_v) == torch.float16 else "tf32x3",
        "STAGES": 2 if narrow and q.shape[3] <= 64 else 1,
        "num_warps": 4 if narrow and small else 8,
        "maxnreg": 255,  # no limit: otherwise ptxas sometimes uses only 32 registers and spills the rest
    }


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    """H, T, S."""
    return q.shape[1], q.shape[2], k.shape[2]


def _as_exact(M_at: Tensor, z_at: Tensor) -> tuple[Tensor, Tensor]:
    """View the memory of M and z as float64, the type in which exact heads store their states."""
    return M_at.view(-1).view(torch.float64), z_at.view(-1).view(torch.float64)


def _spans(M_at: Tensor, z_at: Tensor) -> dict[str, int]:
    """The number of slots of M and of z that a float64 state takes."""
    return {"SPAN": _span(M_at.dtype), "Z_SPAN": _span(z_at.dtype)}


def _span(dtype: torch.dtype) -> int:
    return torch.float64.itemsize // dtype.itemsize


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of x current: kernels are launched on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
