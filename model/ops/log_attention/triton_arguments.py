"""The kernels' arguments, grouped in named tuples, and the functions that load and store tokens.

Whether a member is None is known at compile time, so a kernel without gates, for example, has no
code for them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


def _let_functions_return_none() -> None:
    """Let functions of kernels return None, alone or in a tuple. Triton 3.7 does; this is for
    3.6."""
    from triton.language.semantic import TritonSemantic

    to_tensor = TritonSemantic.to_tensor

    def unless_none(self: Any, x: Any, check_type: bool = True) -> Any:
        return (
            x if isinstance(x, tl.constexpr) and x.value is None else to_tensor(self, x, check_type)
        )

    TritonSemantic.to_tensor = unless_none


if triton.__version__.startswith("3.6."):
    _let_functions_return_none()


class Constants(NamedTuple):
    """What a kernel is compiled for. Dimensions of products are powers of two, and at least 16."""

    D_K: int
    D_V: int
    BK: int
    """Features of a key, as a dimension of products."""
    BV: int
    """Value columns of a program."""
    BLOCKS: int
    """Programs of a head."""
    C: int
    """Tokens of a chunk."""
    OPERAND: Any
    """The type of operands of products."""
    ACC: Any
    """The type of sums."""
    PRECISION: str
    CERTAIN: float
    """The least sum that is certain."""
    SHRINKS: int
    """By how many powers of two a frame can shrink after a chunk."""
    SPAN: int
    """Slots of M that a float64 state takes."""
    Z_SPAN: int
    """Slots of z that a float64 state takes."""


class Tokens(NamedTuple):
    """A tensor (B, H, T, D)."""

    pointer: Any
    strides: tuple[int, ...]
    """Of B, H and T; that of D is 1."""


class Rows(NamedTuple):
    """A head of a tensor (B, H, T, D)."""

    pointer: Any
    stride: Any
    """From a token to the next."""


class Sums(NamedTuple):
    """A state or its logarithm, the gradient of one, or where those of a head are in memory."""

    s: Any
    """(BK, BV)."""
    z: Any
    """(BK,): the normalizer's column."""


class Inputs(NamedTuple):
    """The inputs of the operator, or their gradients."""

    q: Any
    k: Any
    log_v: Any
    log_f: Any
    state: Any
    H: Any
    T: Any


class Outputs(NamedTuple):
    """Its outputs, or their gradients."""

    log_y: Any
    state: Any


class Saved(NamedTuple):
    """For the backward pass: slot n has the state before chunk n, in the frames that count chunk
    n's keys and values.

    The last slot has the state after the last chunk, in the frames left after it.
    """

    state: Any
    key: Any
    value: Any
    slots: Any


class Segments(NamedTuple):
    """Runs of chunks of every sequence that programs compute in parallel: the second dimension of
    the grid counts them."""

    sums: Any
    """Saved: slot s has what segment s alone adds to the state or, in the backward pass, to the
    state's gradient."""
    log_f: Any
    """(B H, slots): sums of a segment's gates; without gates, any tensor."""
    chunks: Any
    """Of a segment. The last one has what is left."""


class Program(NamedTuple):
    """What a program computes."""

    g: Any
    """A head, counted through (B, H)."""
    part: Any
    """The block and the head, counted through (BLOCKS, B, H): a sum over all values has a slot for
    each, where the program stores what its block adds."""
    block: Any
    """A block of value columns, counted."""
    d: Any
    """(BK,): features."""
    e: Any
    """(BV,): the value columns."""


@triton.jit
def program_of(P: tl.constexpr):
    """Return what this program computes."""
    g = (tl.program_id(0) // P.BLOCKS).to(tl.int64)
    block = tl.program_id(0) % P.BLOCKS
    part = block * (tl.num_programs(0) // P.BLOCKS).to(tl.int64) + g
    return Program(g, part, block, tl.arange(0, P.BK), block * P.BV + tl.arange(0, P.BV))


@triton.jit
def chunks_of(segments, N):
    """Return this program's first chunk and the one after its last, of N."""
    if segments is None:
        return 0, N
    else:
        first = tl.program_id(1) * segments.chunks
        return first, tl.minimum(first + segments.chunks, N)


@triton.jit
def gates_of_segment(x, segments, s, g):
    """The sum of head g's gates in segment s; None without gates."""
    if x.log_f is None:
        return None
    else:
        return tl.load(segments.log_f + g * segments.sums.slots + s)


@triton.jit
def head_of(x, g, H):
    """Head g of the tensor x, None of None."""
    if x is None:
        return None
    else:
        return Rows(x.pointer + (g // H) * x.strides[0] + (g % H) * x.strides[1], x.strides[2])


@triton.jit
def packed_head(x, g, T, H, D: tl.constexpr):
    """The same of a tensor that lies in memory as (., T, H, D)."""
    if x is None:
        return None
    else:
        return Rows(x + ((g // H) * T * H + g % H) * D, H * D)


@triton.jit
def heads_of(x, g):
    """Head g of all arguments. The state stays whole: its slot g is that of the head."""
    q = head_of(x.q, g, x.H)
    k = head_of(x.k, g, x.H)
    log_v = head_of(x.log_v, g, x.H)
    log_f = head_of(x.log_f, g, x.H)
    return Inputs(q, k, log_v, log_f, x.state, x.H, x.T)


@triton.jit
def gradients_of(to, program, P: tl.constexpr):
    """Where the program writes gradients: those of head g, and its slot of those that are sums over
    all values."""
    g = program.g
    part = program.part
    q = packed_head(to.q, part, to.T, to.H, P.D_K)
    k = packed_head(to.k, part, to.T, to.H, P.D_K)
    log_v = packed_head(to.log_v, g, to.T, to.H, P.D_V)
    log_f = packed_head(to.log_f, part, to.T, to.H, 1)
    state = to.state
    if state is not None:
        state = Sums(state.s + g * P.D_K * P.D_V, state.z + part * P.D_K)
    return Inputs(q, k, log_v, log_f, state, to.H, to.T)


@triton.jit
def load_chunk(head, n, length, column, fill, D: tl.constexpr, P: tl.constexpr):
    """Tokens of chunk n of a head, some of its D columns: (C, columns); `fill` where there is
    none."""
    pointers, here = _chunk_of(head, n, length, column, D, P)
    return tl.load(pointers, mask=here, other=fill).to(P.ACC)


@triton.jit
def store_chunk(x, head, n, length, column, D: tl.constexpr, P: tl.constexpr):
    """Undo `load_chunk`."""
    pointers, here = _chunk_of(head, n, length, column, D, P)
    tl.store(pointers, x.to(head.pointer.dtype.element_ty), mask=here)


@triton.jit
def _chunk_of(head, n, length, column, D: tl.constexpr, P: tl.constexpr):
    """Where these columns of chunk n are, (C, columns), and which of them there are."""
    rows = tl.arange(0, P.C)
    token = head.pointer + n * P.C * tl.cast(head.stride, tl.int64)
    here = (n * P.C + rows < length)[:, None] & (column < D)[None, :]
    return token + rows[:, None] * head.stride + column[None, :], here


@triton.jit
def load_gates(head, n, length, P: tl.constexpr):
    """The gates of chunk n of a head (C,); 0 after the last token."""
    t = n * P.C + tl.arange(0, P.C)
    return tl.load(
        head.pointer + t * tl.cast(head.stride, tl.int64), mask=t < length, other=0.0
    ).to(P.ACC)


@triton.jit
def store_gates(x, head, n, length, P: tl.constexpr):
    """Undo `load_gates`."""
    t = n * P.C + tl.arange(0, P.C)
    tl.store(
        head.pointer + t * tl.cast(head.stride, tl.int64),
        x.to(head.pointer.dtype.element_ty),
        mask=t < length,
    )


@triton.jit
def empty(fill, dtype: tl.constexpr, P: tl.constexpr):
    """Sums that are everywhere `fill`."""
    BK: tl.constexpr = P.BK
    BV: tl.constexpr = P.BV
    return Sums(tl.full((BK, BV), fill, dtype), tl.full((BK,), fill, dtype))


@triton.jit
def load_state(states, n, program, fill, P: tl.constexpr):
    """Load slot n of states; `fill` where there is none."""
    pointers, here = _slot_of(states, n, program, P)
    z = tl.load(states.z + n * P.D_K + program.d, mask=program.d < P.D_K, other=fill)
    return Sums(tl.load(pointers, mask=here, other=fill), z)


@triton.jit
def store_state(states, n, s, z, program, P: tl.constexpr):
    """Undo `load_state`. All blocks of a head store the same normalizer's column."""
    pointers, here = _slot_of(states, n, program, P)
    tl.store(pointers, s, mask=here)
    tl.store(states.z + n * P.D_K + program.d, z, mask=program.d < P.D_K)


@triton.jit
def _slot_of(states, n, program, P: tl.constexpr):
    """Where s of slot n is, (BK, BV), and which of its elements there are."""
    here = (program.d < P.D_K)[:, None] & (program.e < P.D_V)[None, :]
    slot = states.s + n * tl.cast(P.D_K * P.D_V, tl.int64)
    return slot + program.d[:, None] * P.D_V + program.e[None, :], here


@triton.jit
def any_of(flags, count):
    """Whether one of `count` flags in memory is set."""
    is_set = 0
    for start in range(0, count, 1024):
        n = start + tl.arange(0, 1024)
        is_set |= tl.max(tl.load(flags + n, mask=n < count, other=0).to(tl.int32), 0)
    return is_set
