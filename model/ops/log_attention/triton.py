"""Log-space attention by GPU kernels: `chunked.py` with the state on the chip, then `exact.py` for
doubtful heads.

The kernels are in triton_kernels.py, those of `exact.py` in triton_exact.py; docs/kernels.md
explains their design.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from common.numbers import ceil_div
from model.ops.custom import (
    CHUNK,
    accumulation_dtype,
    operator,
    refuse_second_order,
    refuse_transforms,
)
from model.ops.log_attention.chunked import NAMES
from model.ops.log_attention.exact import recomputed_tiles
from model.ops.log_attention.exponentials import CERTAIN
from model.ops.log_attention.state import LogAttentionState
from model.ops.log_attention.triton_arguments import (
    Constants,
    Inputs,
    Outputs,
    Saved,
    Segments,
    Sums,
    Tokens,
)
from model.ops.log_attention.triton_exact import exact_backward, exact_forward
from model.ops.log_attention.triton_kernels import backward_sweep, forward_sweep
from model.ops.triton_launch import launching

# Powers of two by which a frame can shrink after a chunk, without gates and with them.
FEW = 24
MANY = 40

# In units of a chunk's time: a chunk of a sweep with OWN, by instructions of both passes for
# compute capability 9.0 (4,679 of 10,123 for the flagship, 2,112 of 4,146 for heads of 32), and
# estimates of joining a segment and of launching such a sweep.
OWN_PART = 0.5
JOIN = 0.25
START = 4.0


def triton_log_attention(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None = None,
    *,
    state: LogAttentionState | None = None,
    return_state: bool = False,
    segments: int = 0,
) -> Tensor | tuple[Tensor, LogAttentionState]:
    """As causal `log_attention`, for tensors with any strides; the memory layout of log_y is (B, T,
    H, d_v).

    The operands of products have the type of q and k: bfloat16 for bfloat16, tf32 (with the range
    of bfloat16 and the digits of float16) for float16, and three products of tf32 for float32.
    log_v may be wider; its exponentials are rounded to that type. Sums are kept in float32, or
    float64 for float64.

    Args:
        segments: most segments of a sequence, which are computed in parallel; 0: `fastest_segments`
            says how many.
    """
    acc = accumulation_dtype(q)
    log_s = None
    log_z = None
    if state is not None:
        log_s = state.log_s.to(acc).contiguous()
        log_z = state.log_z.to(acc).contiguous()
    inputs = [x for x in (q, k, log_v, log_f, log_s, log_z) if x is not None]
    refuse_transforms(*NAMES, *inputs)
    save = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    log_y, log_s, log_z, *_ = _attend(
        q, k, log_v, log_f, log_s, log_z, return_state, save, segments
    )
    return (log_y, LogAttentionState(log_s, log_z)) if return_state else log_y


_Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Those of `_attend`: see `_empty_results`."""


class _Tensors(NamedTuple):
    """The arguments of the operator, or their gradients."""

    q: Tensor
    k: Tensor
    log_v: Tensor
    log_f: Tensor | None
    log_s: Tensor | None
    log_z: Tensor | None


@operator("log_attention_triton")
def _attend(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None,
    log_s: Tensor | None,
    log_z: Tensor | None,
    want_state: bool,
    save: bool,
    most_segments: int = 0,
) -> _Results:
    """Return log_y, the state after, and tensors for the backward pass."""
    inputs = _Tensors(q, k, log_v, log_f, log_s, log_z)
    P = _constants(inputs)
    results = _empty_results(inputs, want_state, save)
    log_y, log_s_after, log_z_after, *saved, doubtful = results
    outputs = Outputs(_tokens(log_y), Sums(log_s_after, log_z_after) if want_state else None)
    fast = _saved(*saved) if save else None
    exact = _exact(*saved) if save else None
    counter = recomputed_tiles("forward", q.device)
    with launching(q):
        x = _arguments(inputs)
        segments = _segments(inputs, P, most_segments)
        sweep = functools.partial(forward_sweep[_grid(q, P, segments)], P=P, **_launch(P))
        if segments is not None:
            sweep(x._replace(state=None), outputs, None, doubtful, segments, OWN=True)
        sweep(x, outputs, fast, doubtful, segments, OWN=False)
        exact_forward[_grid(q, P)](x, outputs, exact, doubtful, counter, P=P, num_warps=8)
    return results


@torch.library.register_fake(_attend)
def _(
    q: Tensor, k: Tensor, log_v: Tensor, log_f: Any, log_s: Any, log_z: Any, *flags: Any
) -> tuple[Tensor, ...]:
    return _empty_results(_Tensors(q, k, log_v, log_f, log_s, log_z), *flags[:2])


def _empty_results(inputs: _Tensors, want_state: bool, save: bool) -> _Results:
    """Allocate all results of `_attend`.

    log_y (B, H, T, d_v). The state's log_s (B, H, d_k, d_v) and log_z (B, H, d_k), or empty tensors
    if it is not asked for.

    To save: M (B H, slots, d_k, d_v), z and the frame of keys (B H, slots, d_k), and the frame of
    values (B H, slots, d_v). There is a slot before each chunk and one after the last. Their number
    is rounded up to whole spans (see triton_exact.py).

    (B H, N + 1, blocks): whether each tile of queries, and the last state, is doubtful, by block of
    value columns.
    """
    q = inputs.q
    log_v = inputs.log_v
    P = _constants(inputs)
    B, H, T, d_k = q.shape
    d_v = log_v.shape[3]
    G = B * H
    acc = accumulation_dtype(q)
    slots = ceil_div(T, P.C) + 1 if save else 0
    slots += -slots % P.SPAN
    return (
        log_v.new_empty(B, T, H, d_v).transpose(1, 2),
        q.new_empty((B, H, d_k, d_v) if want_state else 0, dtype=acc),
        q.new_empty((B, H, d_k) if want_state else 0, dtype=acc),
        q.new_empty(G, slots, d_k, d_v, dtype=_operand(inputs)),
        q.new_empty(G, slots, d_k, dtype=acc),
        q.new_empty(G, slots, d_k, dtype=acc),
        q.new_empty(G, slots, d_v, dtype=acc),
        q.new_empty(G, ceil_div(T, P.C) + 1, P.BLOCKS, dtype=torch.int8),
    )


@operator("log_attention_triton_backward")
def _attend_backward(
    g: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    most_segments: int,
) -> list[Tensor]:
    """Return gradients of the inputs (empty for those that are None).

    Args:
        g: gradient of log_y, and of log_s and log_z if the state was returned.
        saved: the results of `_attend` for the backward pass.
    """
    tensors = _Tensors._make(inputs)
    g_y, *g_state = g
    *state, doubtful = saved
    P = _constants(tensors)
    to = _empty_gradients(tensors)
    counter = recomputed_tiles("backward", g_y.device)
    g_of = Outputs(_tokens(g_y), Sums(*(x.contiguous() for x in g_state)) if g_state else None)
    x = _arguments(tensors)
    g_x = Inputs(*to[:4], None if to.log_s is None else Sums(to.log_s, to.log_z), x.H, x.T)
    with launching(g_y):
        segments = _segments(tensors, P, most_segments)
        sweep = functools.partial(backward_sweep[_grid(tensors.q, P, segments)], P=P, **_launch(P))
        if segments is not None:
            sweep(g_of, x, _saved(*state), doubtful, g_x, segments, OWN=True)
        sweep(g_of, x, _saved(*state), doubtful, g_x, segments, OWN=False)
        exact_backward[_grid(tensors.q, P)](
            g_of, x, _exact(*state), doubtful, counter, g_x, P=P, num_warps=8
        )
    return _summed(to, tensors)


@torch.library.register_fake(_attend_backward)
def _(g: Sequence[Tensor], inputs: Sequence[Tensor | None], *_: Any) -> list[Tensor]:
    tensors = _Tensors._make(inputs)
    return _summed(_empty_gradients(tensors), tensors)


def _empty_gradients(inputs: _Tensors) -> _Tensors:
    """Allocate gradients. Those of tokens have the layout (B, T, H, d).

    All gradients except those of log_v and log_s are sums over all values, of which each block of
    value columns writes a part. Their first dimension counts the blocks, times B.
    """
    q, k, log_v, log_f, log_s, log_z = inputs
    blocks = _constants(inputs).BLOCKS

    def like(x: Tensor, blocks: int) -> Tensor:
        B, H, T, D = x.shape
        dtype = x.dtype if blocks == 1 else accumulation_dtype(q)
        return x.new_empty(blocks * B, T, H, D, dtype=dtype).transpose(1, 2)

    return _Tensors(
        like(q, blocks),
        like(k, blocks),
        like(log_v, 1),
        None if log_f is None else like(log_f, blocks),
        None if log_s is None else torch.empty_like(log_s),
        None if log_z is None else log_z.new_empty(blocks * len(log_z), *log_z.shape[1:]),
    )


def _summed(parts: _Tensors, inputs: _Tensors) -> list[Tensor]:
    """Sum the parts of gradients. An empty tensor stands for None, which an operator cannot
    return."""
    sums = []
    for part, x in zip(parts, inputs, strict=True):
        if part is None or x is None:
            part = inputs.q.new_empty(0)
        elif len(part) != len(x):
            part = part.unflatten(0, (-1, len(x))).sum(0).to(x.dtype)
        sums.append(part)
    return sums


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.want_state, _, ctx.segments = inputs
    ctx.save_for_backward(*tensors, *output[3:])
    ctx.mark_non_differentiable(*output[3:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *g: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_second_order(*NAMES)
    saved = ctx.saved_tensors  # read once, as torch asks where they are recomputed
    inputs = _Tensors(*saved[:6])
    B, H, T, d_k = inputs.q.shape
    d_v = inputs.log_v.shape[3]
    shapes = [(B, H, T, d_v), (B, H, d_k, d_v), (B, H, d_k)][: 3 if ctx.want_state else 1]
    acc = accumulation_dtype(inputs.q)
    filled = [
        inputs.q.new_zeros(shape, dtype=acc) if x is None else x
        for x, shape in zip(g, shapes, strict=False)
    ]
    gradients = _attend_backward(filled, inputs, saved[6:], ctx.segments)
    wanted = (None if x is None else g_x for x, g_x in zip(inputs, gradients, strict=True))
    return *wanted, None, None, None


torch.library.register_autograd(_attend, _backward, setup_context=_save_for_backward)


def _tokens(x: Tensor) -> Tokens:
    """A tensor (B, H, T, D) for a kernel. The last dimension is made dense if it has gaps."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return Tokens(x, x.stride()[:3])


def _arguments(inputs: _Tensors) -> Inputs:
    q, k, log_v, log_f, log_s, log_z = inputs
    state = None if log_s is None else Sums(log_s, log_z)
    of_gates = None if log_f is None else _tokens(log_f)
    return Inputs(_tokens(q), _tokens(k), _tokens(log_v), of_gates, state, q.shape[1], q.shape[2])


def _saved(M: Tensor, z: Tensor, key: Tensor, value: Tensor) -> Saved:
    return Saved(Sums(M, z), key, value, M.shape[1])


def _exact(M: Tensor, z: Tensor, key: Tensor, value: Tensor) -> Saved:
    """View the memory of M and z as float64, the type in which exact heads store their states.

    Nothing reads the frames: they are there because Triton 3.6 does not take None in their place.
    """
    return Saved(Sums(*(x.view(-1).view(torch.float64) for x in (M, z))), key, value, M.shape[1])


def _operand(inputs: _Tensors) -> torch.dtype:
    """The type of products' operands and of M. Values may be wider; their exponentials are rounded
    to it."""
    common = torch.promote_types(inputs.q.dtype, inputs.k.dtype)
    return common if common == torch.bfloat16 else accumulation_dtype(inputs.q)


def _constants(inputs: _Tensors) -> Constants:
    q, k, log_v, log_f, *_ = inputs
    d_k = q.shape[3]
    d_v = log_v.shape[3]
    acc = accumulation_dtype(q)
    operand = _operand(inputs)
    narrow = operand == torch.bfloat16
    wide = acc == torch.float64
    # The columns of a program: fewer for wide types, because of the multiprocessor's shared memory.
    columns = 64 if narrow or d_k <= 64 else 32
    operand_type = tl.bfloat16 if narrow else tl.float32
    precision = "tf32" if q.dtype == k.dtype == torch.float16 else "tf32x3"
    if wide:
        columns = 16
        operand_type = tl.float64
        precision = "ieee"
    shrinks = FEW if log_f is None else MANY
    return Constants(
        D_K=d_k,
        D_V=d_v,
        BK=max(16, triton.next_power_of_2(d_k)),
        BV=max(16, triton.next_power_of_2(min(d_v, columns))),
        BLOCKS=ceil_div(d_v, columns),
        C=CHUNK if narrow or d_k <= 32 else CHUNK // 2,
        OPERAND=operand_type,
        ACC=tl.float64 if wide else tl.float32,
        PRECISION=precision,
        # A number that became 0 in a frame may be 2^shrinks times as large in the next one.
        CERTAIN=CERTAIN[acc] * 2.0 ** (shrinks - FEW),
        SHRINKS=shrinks,
        SPAN=torch.float64.itemsize // operand.itemsize,
        Z_SPAN=torch.float64.itemsize // acc.itemsize,
    )


def _launch(P: Constants) -> dict[str, int]:
    """Launch options: see docs/kernels.md. Without maxnreg, ptxas sometimes uses 32 registers and
    spills the rest."""
    warps = 4 if P.OPERAND == tl.bfloat16 and P.D_K <= 64 else 8
    return {"num_warps": warps, "num_stages": 1, "maxnreg": 255}


def _grid(q: Tensor, P: Constants, segments: Segments | None = None) -> tuple[int, int]:
    return q.shape[0] * q.shape[1] * P.BLOCKS, 1 if segments is None else segments.sums.slots


def _segments(inputs: _Tensors, P: Constants, most: int) -> Segments | None:
    """Allocate what segments add to the state; None for a single sweep. `most` is that of
    `triton_log_attention`."""
    q, _, log_v, log_f, *_ = inputs
    B, H, T, d_k = q.shape
    d_v = log_v.shape[3]
    acc = accumulation_dtype(q)
    G = B * H
    N = ceil_div(T, P.C)
    chunks = ceil_div(N, most or fastest_segments(G * P.BLOCKS, N, _programs_at_once(q.device, P)))
    S = ceil_div(N, chunks)  # none is empty
    if S == 1:
        return None
    shapes = (G, S, d_k, d_v), (G * P.BLOCKS, S, d_k), (G, S, d_k), (G, S, d_v)
    slots = _saved(*(q.new_empty(shape, dtype=acc) for shape in shapes))
    if log_f is None:
        # Nothing reads it. Triton 3.6 cannot compare a tuple that holds None with None.
        sums = slots.key
    else:
        padded = pad(log_f.to(acc), (0, 0, 0, S * chunks * P.C - T))
        sums = padded.unflatten(2, (S, -1)).sum(3).reshape(G, S)
    return Segments(slots, sums, chunks)


def _programs_at_once(device: torch.device, P: Constants) -> int:
    """How many programs a GPU runs at once: the registers of a multiprocessor are enough for 8
    warps."""
    if device.type != "cuda":
        return 1
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        * 8
        // _launch(P)["num_warps"]
    )


@functools.cache
def fastest_segments(programs: int, chunks: int, at_once: int) -> int:
    """Return the number of segments with the shortest estimated time.

    Args:
        programs: programs of a sweep without segments.
        chunks: chunks of a sequence.
        at_once: programs that the GPU runs at the same time.
    """

    def time(segments: int) -> float:
        if segments == 1:
            return chunks
        return (1 + OWN_PART) * ceil_div(chunks, segments) + JOIN * segments + START

    return min(range(1, max(1, at_once // programs) + 1), key=time)
