"""`gates.py` in kernels: the logarithms of what is forgotten inside a chunk.

A sum of gates is computed for each pair of tokens, never as a difference of two sums, so it is right for gates of any
size, and a reset is a gate of -inf.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from model.ops.log_attention.triton_arguments import load_gates
from model.ops.log_attention.triton_frames import NOTHING, exponent_of, finite, frame_of, power_of_two


class ChunkGates(NamedTuple):
    """Gates of a chunk and their sums; None without gates."""

    each: Any
    """(C,)."""
    start: Any
    """(C,): up to each token."""
    end: Any
    """(C,): after each token."""
    total: Any
    """Of all of them."""


@triton.jit
def gates_of(log_f, n, T, P: tl.constexpr):
    """Return the gates of chunk n of a head."""
    if log_f is None:
        return ChunkGates(None, None, None, None)
    else:
        f = load_gates(log_f, n, T, P)
        return ChunkGates(f, tl.cumsum(f, 0), tl.sum(_later(f), 0), tl.sum(f, 0))


@triton.jit
def _later(each):
    """The gate of each query t for each earlier key j (C, C), else 0."""
    rows = tl.arange(0, each.shape[0])
    return tl.where(rows[:, None] > rows[None, :], each[:, None], 0.0)


@triton.jit
def between(gates):
    """Sums of a head's gates after key j up to query t (C, C); None without gates."""
    return None if gates.each is None else tl.cumsum(_later(gates.each), 0)


@triton.jit
def weigh(A, within):
    """Multiply A (C, C) for queries and keys by the factors `within` of `between`; 0 for later keys."""
    rows = tl.arange(0, A.shape[0])
    A = A if within is None else A * tl.exp(within)
    return tl.where(rows[:, None] >= rows[None, :], A, 0.0)


@triton.jit
def times(x, log_factor):
    """Multiply x by exp of one number, or of one for each row; None is a factor of 1."""
    if log_factor is None:
        return x
    else:
        factor = tl.exp(log_factor)
        if len(x.shape) == 2 and len(factor.shape) == 1:
            factor = factor[:, None]
        return (x * factor).to(x.dtype)


@triton.jit
def left_after_resets(gates, x):
    """Which features of keys, or columns of values, x (C, .), the state after a chunk can have."""
    after_reset = tl.max(tl.where((gates.end > NOTHING)[:, None], x, NOTHING), 0)
    return tl.maximum(after_reset, gates.total) > NOTHING


@triton.jit
def after_gates(key, z, P: tl.constexpr):
    """Return the frame of what is left of the keys after a chunk, and whether it can no longer be certain.

    `key` is the frame in the chunk, and z the sum of keys in it.
    """
    least: tl.constexpr = 2.0**-P.SHRINKS
    left = tl.where((z >= least) & (z < 1.0), exponent_of(z), 0.0)
    return frame_of(key + left, P.OPERAND), tl.max(((z > 0.0) & (z < least)).to(tl.int32))


@triton.jit
def forgotten(gates, key, key_after, P: tl.constexpr):
    """The factors (BK,) of a chunk's end, from M in its frame to M in the next one, which has `key_after`."""
    if gates.total is None:
        return power_of_two(key - finite(key_after))  # at most 1
    else:
        # A frame that starts again after a reset can be any number smaller, but then M is 0.
        return power_of_two(tl.minimum(key - finite(key_after), P.SHRINKS + 1.0))


@triton.jit
def gates_gradient(g, g_after, gates):
    """Return the gradients of a chunk's gates (C,), as `log_f_gradient` in gates.py.

    g (C, BK) is the gradient of queries less that of keys, and g_after (BK,) the sum over values of the state after the
    chunk times its gradient.
    """
    through = tl.cumsum(tl.sum(g, 1), 0, reverse=True) + tl.sum(g_after, 0)
    return tl.where(gates.each == NOTHING, 0.0, through)
