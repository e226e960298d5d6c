"""`gates.py` in kernels: the logarithms of what is forgotten inside a chunk.

A sum of gates is computed for each pair of tokens, never as a difference of two sums, so it is right for gates of any
size, and a reset is a gate of -inf. Gates of features are added to queries and subtracted from keys, as in gates.py;
their resets are treated as gates of the head, 0 or -inf.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from model.ops.log_attention.triton_arguments import load_chunk, store_chunk
from model.ops.log_attention.triton_frames import (
    LOG2E,
    LOST,
    NOTHING,
    exp_measured,
    exponent_of,
    finite,
    frame_of,
    power_of_two,
)


class ChunkGates(NamedTuple):
    """Sums of gates in a chunk; None without gates."""

    a: Any
    """(C, BK): of each feature up to each token, without resets; None if the head has one gate."""
    of_head: Any
    """(C,): a head's gates."""
    start: Any
    """(C,): up to each token."""
    end: Any
    """(C,): after each token."""
    total: Any
    """Of all of them."""


@triton.jit
def gates_of(log_f, n, T, d, P: tl.constexpr):
    """Return the gates of chunk n of a head."""
    if log_f is None:
        return ChunkGates(None, None, None, None, None)
    else:
        f = load_chunk(log_f, n, T, d, 0.0, P.D_F, P)  # (C, BK)
        if P.D_F == 1:
            a = None
            of_head = tl.sum(f, 1)
        else:
            reset = tl.max(tl.where((d < P.D_K)[None, :], f, NOTHING), 1) == NOTHING
            a = tl.maximum(tl.cumsum(tl.where(reset[:, None], 0.0, f), 0), -4 * P.REACH)
            of_head = tl.where(reset, NOTHING, 0.0).to(P.ACC)
        end = tl.sum(_later(of_head), 0)
        return ChunkGates(a, of_head, tl.cumsum(of_head, 0), end, tl.sum(of_head, 0))


@triton.jit
def _later(of_head):
    """The gate of each query t for each earlier key j (C, C), else 0."""
    rows = tl.arange(0, of_head.shape[0])
    return tl.where(rows[:, None] > rows[None, :], of_head[:, None], 0.0)


@triton.jit
def between(gates):
    """Sums of a head's gates after key j up to query t (C, C); None without gates."""
    return None if gates.of_head is None else tl.cumsum(_later(gates.of_head), 0)


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
def out_of_range(gates, key, P: tl.constexpr):
    """Whether a chunk in the frame `key` has numbers out of their range. What follows in the head is then doubtful."""
    beyond = key == LOST
    if gates.a is not None:
        beyond |= (tl.min(gates.a, 0) >= -P.REACH) == 0
    return tl.max(beyond.to(tl.int32))


@triton.jit
def after_gates(key, z, gates, P: tl.constexpr):
    """Return the frame of what is left of the keys after a chunk, and whether it can no longer be certain.

    `key` is the frame in the chunk, and z the sum of keys in it.
    """
    least: tl.constexpr = 2.0**-P.SHRINKS
    left = tl.where((z >= least) & (z < 1.0), exponent_of(z), 0.0)
    unsure = tl.max(((z > 0.0) & (z < least)).to(tl.int32))
    if gates.a is not None:
        whole, _ = _kept(gates, P)
        left += whole
    return frame_of(key + left, P.OPERAND), unsure


@triton.jit
def forgotten(gates, key, key_after, P: tl.constexpr):
    """The factors (BK,) of a chunk's end, from M in its frame to M in the next one, which has `key_after`."""
    if gates.total is None:
        return power_of_two(key - finite(key_after))  # at most 1
    else:
        # A frame that starts again after a reset can be any number smaller, but then M is 0.
        if gates.a is None:
            return power_of_two(tl.minimum(key - finite(key_after), P.SHRINKS + 1.0))
        else:
            whole, rest = _kept(gates, P)
            return rest * power_of_two(tl.minimum(key + whole - finite(key_after), P.SHRINKS + 1.0))


@triton.jit
def _kept(gates, P: tl.constexpr):
    """What a chunk's gates keep of each feature, as a power of two and a rest."""
    a = tl.min(gates.a, 0)
    whole = tl.floor(a * LOG2E + 0.5)
    return whole, exp_measured(a, whole, P.ACC)


@triton.jit
def store_gates(g, g_after, to, log_f, n, T, d, P: tl.constexpr):
    """Store the gradients of a chunk's gates, as `log_f_gradient` in gates.py.

    g (C, BK) is the gradient of queries less that of keys, and g_after (BK,) the sum over values of the state after the
    chunk times its gradient.
    """
    f = load_chunk(log_f, n, T, d, 0.0, P.D_F, P)
    if P.D_F == 1:
        through = (tl.cumsum(tl.sum(g, 1), 0, reverse=True) + tl.sum(g_after, 0))[:, None]
    else:
        through = tl.cumsum(g, 0, reverse=True) + g_after[None, :]
    store_chunk(tl.where(f == NOTHING, 0.0, through), to, n, T, d, P.D_F, P)
