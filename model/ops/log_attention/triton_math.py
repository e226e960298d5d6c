"""Functions that the kernels share: exponentials in frames, as in exponentials.py, their products,
and gates.

Gates between two tokens are a difference of two sums. Each sum has two parts, and that of the
larger digits is exact, so large gates do not round small ones away. Gates whose exponentials are 0
are cut off, resets among them.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from model.ops.log_attention.triton_arguments import load_gates

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
NOTHING = tl.constexpr(-math.inf)
LOG2E = tl.constexpr(1 / math.log(2))
LN2 = tl.constexpr(math.log(2))
# ln 2 in two parts: the first has 4 bits, so that its multiples up to 2^20, the largest frame, are
# exact in float32.
LN2_HIGH = tl.constexpr(11 / 16)
LN2_LOW = tl.constexpr(math.log(2) - 11 / 16)
LOST = tl.constexpr(2.0**30)  # a frame that scales everything to 0, and so makes every sum doubtful


@triton.jit
def finite(x):
    """`x` with 0 for an infinity, so that a difference from it is never that of two infinities."""
    return tl.where(tl.abs(x) == -NOTHING, 0.0, x)


@triton.jit
def frame_above(log2, OPERAND: tl.constexpr):
    """Return the smallest whole number not below log2, up to rounding, in the range of
    `scaled_exp`.

    Numbers below the range get its lower limit, and numbers above it LOST.
    """
    limit: tl.constexpr = 900.0 if OPERAND == tl.bfloat16 else 2.0**20
    frame = tl.ceil(log2)
    frame = tl.where((frame < -limit) & (frame > NOTHING), -limit, frame)
    return tl.where(frame > limit, LOST, frame)


@triton.jit
def exponent_of(x):
    """The exponent of a number that is normal and at least 0; 0 has the smallest."""
    if x.dtype == tl.float64:
        return ((x.to(tl.int64, bitcast=True) >> 52) - 1023).to(tl.float64)
    else:
        return ((x.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)


@triton.jit
def is_doubtful(sums, CERTAIN: tl.constexpr):
    """True for sums below CERTAIN, for infinity and for NaN."""
    return ((sums >= CERTAIN) & (sums < float("inf"))) == 0


@triton.jit
def power_of_two(n):
    """2^n for a whole n up to 127, made of its bits, so that it is exact; 0 where 2^n is below the
    normal numbers."""
    if n.dtype == tl.float64:
        return ((tl.maximum(n, -1023.0) + 1023.0).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    else:
        return ((tl.maximum(n, -127.0) + 127.0).to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled_exp(x, frame, OPERAND: tl.constexpr):
    """exp(x) 2^-frame for a frame that is at most about 1 below x log2(e). The mantissa does not
    depend on the frame.

    x log2(e) is split into an integer and a remainder before the frame is subtracted. For bfloat16
    it is rounded to a multiple of 2^-11 instead, since 2^-12 of an exponent is less than bfloat16's
    own rounding. Adding and subtracting a large number rounds. This is faster than an instruction
    that rounds: GPUs execute few of these at once.
    """
    if OPERAND == tl.bfloat16:
        x = tl.clamp(x, -1400.0, 1400.0, propagate_nan=tl.PropagateNan.ALL)
        # 6144 is 1.5 x 2^12, whose last bit is 2^-11.
        return tl.exp2((x * LOG2E + 6144.0) - (6144.0 + frame))
    else:
        wide: tl.constexpr = x.dtype == tl.float64
        large: tl.constexpr = 1.5 * 2.0**52 if wide else 1.5 * 2.0**23
        # In float64, Triton 3.7 compiles limits of equal size to an instruction that only float32
        # has.
        x = tl.clamp(
            x, -(2.0**21), 2.0**21 + (1.0 if wide else 0.0), propagate_nan=tl.PropagateNan.ALL
        )
        n = (x * LOG2E + large) - large
        rest = (x - n * LN2_HIGH) - n * LN2_LOW  # x - n ln 2, between -0.35 and 0.35
        return tl.exp2(rest * LOG2E) * power_of_two(n - frame)


@triton.jit
def log_of_scaled(x, frame):
    """log(x 2^frame) of x >= 0. The result depends only on x 2^frame, not on the frame."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        exponent = ((bits >> 52) - 1023).to(tl.float64)
        mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        # The bits of 1.5 x 2^23, whose last bit is 1: added and taken away, a whole number becomes
        # a float.
        exponent = ((bits >> 23) + (0x4B400000 - 127)).to(tl.float32, bitcast=True) - 12582912.0
        mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    n = exponent + frame
    log = (_log2_of_mantissa(mantissa) * LN2 + n * LN2_LOW) + n * LN2_HIGH
    return tl.where(x > 0.0, log, x + NOTHING)  # x is 0 or NaN


@triton.jit
def reciprocal(x):
    """1 / x."""
    if INTERPRETED or x.dtype == tl.float64:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _log2_of_mantissa(x):
    """log2 of x between 1 and 2; the GPU's own in float32, which is right to 2^-22."""
    if INTERPRETED or x.dtype == tl.float64:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )


@triton.jit
def once(x, P: tl.constexpr):
    """x itself, which the compiler cannot compute again, or earlier, for another layout.

    For wider types it can: holding x would take more shared memory than most GPUs have.
    """
    if INTERPRETED or P.OPERAND != tl.bfloat16:
        return x
    else:
        pack: tl.constexpr = 2 if x.dtype == tl.bfloat16 else 1  # to 32 bits
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=pack
        )


@triton.jit
def product(a, b, P: tl.constexpr):
    """a @ b with operands of type OPERAND and sums in ACC."""
    a = a.to(P.OPERAND)
    b = b.to(P.OPERAND)
    if INTERPRETED:  # its dot treats bfloat16 as integers
        a = a.to(P.ACC)
        b = b.to(P.ACC)
    return tl.dot(a, b, input_precision=P.PRECISION, out_dtype=P.ACC)


@triton.jit
def applied(a, x, P: tl.constexpr):
    """a @ x for a vector x with all its digits: for bfloat16, in three columns of a product."""
    if P.OPERAND == tl.bfloat16:
        column = tl.arange(0, 16)[None, :]
        high = x.to(P.OPERAND).to(P.ACC)
        middle = (x - high).to(P.OPERAND).to(P.ACC)
        low = (x - high) - middle
        digits = tl.where(
            column == 0, high[:, None], tl.where(column == 1, middle[:, None], low[:, None])
        )
        return tl.sum(product(a, tl.where(column < 3, digits, 0.0), P), 1)
    else:
        return tl.sum(a.to(P.ACC) * x[None, :], 1)


class ChunkGates(NamedTuple):
    """Gates of a chunk and their sums; None without gates."""

    log_f: Any
    """(C,)."""
    high: Any
    """(C,): sums up to each token of the larger digits of gates; exact."""
    low: Any
    """(C,): the same of the smaller digits."""
    n_resets: Any
    """(C,): resets up to each token."""
    start: Any
    """(C,): sums of gates up to each token."""
    end: Any
    """(C,): sums after each token."""
    total: Any
    """The sum of all gates."""
    all_resets: Any
    """The number of resets."""


@triton.jit
def gates_of(log_f, n, T, P: tl.constexpr):
    """Return the gates of chunk n of a head."""
    if log_f is None:
        return ChunkGates(None, None, None, None, None, None, None, None)
    else:
        wide: tl.constexpr = P.ACC == tl.float64
        least: tl.constexpr = -1024.0 if wide else -128.0  # exp of less is 0, too
        # Added and taken away, it rounds to multiples of 2^-37 or 2^-11, of which a chunk's sums
        # are exact.
        large: tl.constexpr = 1.5 * 2.0**15 if wide else 1.5 * 2.0**12
        f = load_gates(log_f, n, T, P)
        bounded = tl.where(f < least, least, f)
        high = (bounded + large) - large
        low = bounded - high
        is_reset = (f == NOTHING).to(tl.int32)
        highs = tl.cumsum(high, 0)
        lows = tl.cumsum(low, 0)
        high_total = tl.sum(high, 0)
        low_total = tl.sum(low, 0)
        end = (high_total - highs) + (low_total - lows)
        n_resets = tl.cumsum(is_reset, 0)
        all_resets = tl.sum(is_reset, 0)
        return ChunkGates(
            f, highs, lows, n_resets, highs + lows, end, high_total + low_total, all_resets
        )


@triton.jit
def between(gates, A):
    """Factors of a head's gates after key j up to query t (C, C), in the layout of A (C, C); None
    without gates."""
    if gates.log_f is None:
        return None
    else:
        high = beside(tl.broadcast_to(gates.high[:, None], A.shape), A)
        return tl.exp2(
            ((high - gates.high[None, :]) + (gates.low[:, None] - gates.low[None, :])) * LOG2E
        )


@triton.jit
def beside(x, y):
    """x itself, in the registers that hold y: the compiler need not move it there through shared
    memory."""
    if INTERPRETED or x.dtype != tl.float32:
        return x
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [x, y], tl.float32, is_pure=False, pack=1
        )


@triton.jit
def weigh(A, within):
    """Multiply A (C, C) for queries and keys by the factors `within` of `between`; 0 for later
    keys."""
    rows = tl.arange(0, A.shape[0])
    A = A if within is None else A * within
    return tl.where(rows[:, None] >= rows[None, :], A, 0.0)


@triton.jit
def times(x, log_factor):
    """Multiply x by exp of one number, or of one for each row; None is a factor of 1."""
    if log_factor is None:
        return x
    else:
        factor = tl.exp2(log_factor * LOG2E)
        if len(x.shape) == 2 and len(factor.shape) == 1:
            factor = factor[:, None]
        return (x * factor).to(x.dtype)


@triton.jit
def left_after_resets(gates, x):
    """Which columns of x (C, .), keys or values, the state after a chunk can have terms of. None
    without gates: all."""
    if gates.log_f is None:
        return None
    else:
        after_reset = tl.max(tl.where((gates.n_resets == gates.all_resets)[:, None], x, NOTHING), 0)
        return (after_reset > NOTHING) | (gates.all_resets == 0)


@triton.jit
def after_gates(key, z, P: tl.constexpr):
    """Return the frame of the keys after a chunk, from their frame in the chunk and their sum z
    after it.

    If z is below `least`, the frame stays: in a smaller one, what z and M have lost to underflow
    could matter.
    """
    least: tl.constexpr = 2.0**-P.SHRINKS
    left = tl.where((z >= least) & (z < 1.0), exponent_of(z), 0.0)
    return frame_above(key + left, P.OPERAND)


@triton.jit
def key_factor(gates, key, key_after, P: tl.constexpr):
    """The factors (BK,) from M after a chunk, in its frame of keys, to M in the next frame
    `key_after`."""
    if gates.total is None:
        return power_of_two(key - finite(key_after))  # at most 1
    else:
        # After a reset the next frame can be smaller by any number, but then M is 0. The frame of
        # joined segments does not grow with the number of keys, up to 2^20, so it can be 21 lower.
        return power_of_two(tl.minimum(key - finite(key_after), P.SHRINKS + 21.0))


@triton.jit
def gates_gradient(g, g_after, gates):
    """Return the gradients of a chunk's gates (C,), as `log_f_gradient` in gates.py.

    g (C,) sums the gradient of queries less that of keys over features, and g_after (BK,) the state
    after the chunk times its gradient over values.
    """
    # One dimension more, as in _largest, for compute capability 10.
    through = tl.cumsum(g, 0, reverse=True) + tl.sum(tl.sum(g_after[None, :], 1), 0)
    return tl.where(gates.log_f == NOTHING, 0.0, through)
