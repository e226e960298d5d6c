"""`exact.py` as kernels. They are always launched after the fast ones, and return at once unless a
head is doubtful.

So the CPU never has to wait for the GPU to learn whether a head is doubtful. As in the fast
kernels, a program computes a head g and a block of value columns e. All numbers are float64.

The backward pass needs the state after every token. It starts from the state that the forward pass
stored before a span of tokens (in the memory of M, where SPAN slots hold a float64 state), steps
forward to a part of the span, and from there to each of its PART tokens. Parts as long as the
square root of a span would take the fewest steps.
"""

import triton
import triton.language as tl

from model.ops.log_attention.triton_arguments import (
    Sums,
    any_of,
    empty,
    gradients_of,
    head_of,
    heads_of,
    load_state,
    program_of,
    store_state,
)
from model.ops.log_attention.triton_math import NOTHING, finite

PART = tl.constexpr(16)


@triton.jit
def exact_forward(x, outputs, saved, doubtful, counter, P: tl.constexpr):
    """Write log_y of doubtful tiles and, for heads with such tiles, the states before each span and
    at the end."""
    program = program_of(P)
    N = tl.cdiv(x.T, P.C)
    doubtful += program.g * (N + 1) * P.BLOCKS
    if any_of(doubtful, (N + 1) * P.BLOCKS) == 0:
        return
    x = heads_of(x, program.g)
    log_y = head_of(outputs.log_y, program.g, x.H)
    state = _state(x.state, program, NOTHING, P)

    repaired = 0
    for n in range(N):
        if saved is not None:
            if n % P.SPAN == 0:
                store_state(
                    _spans_of(saved, program.g, P), n // P.SPAN, state.s, state.z, program, P
                )
        is_doubtful = any_of(doubtful + n * P.BLOCKS, P.BLOCKS)
        repaired += is_doubtful
        for t in range(n * P.C, tl.minimum(n * P.C + P.C, x.T)):
            state = _after_tokens(state, x, t, t + 1, program, P)
            if is_doubtful:
                q_t = _load(x.q, t, program.d, P.D_K)
                y = _logsumexp(q_t[:, None] + state.s) - _logsumexp(q_t + state.z)
                _store(log_y, t, program.e, P.D_V, y)
    if program.block == 0:
        tl.atomic_add(counter, repaired)
    if outputs.state is not None:
        store_state(outputs.state, program.g, state.s, state.z, program, P)


@triton.jit
def exact_backward(g_of, x, saved, doubtful, counter, to, P: tl.constexpr):
    """Write all gradients of doubtful heads. The loop carries g, the gradient of the state's
    logarithm."""
    program = program_of(P)
    N = tl.cdiv(x.T, P.C)
    if any_of(doubtful + program.g * (N + 1) * P.BLOCKS, (N + 1) * P.BLOCKS) == 0:
        return
    x = heads_of(x, program.g)
    to = gradients_of(to, program, P)
    g_y = head_of(g_of.log_y, program.g, x.H)
    spans = _spans_of(saved, program.g, P)
    if program.block == 0:
        tl.atomic_add(counter, N)

    g = _state(g_of.state, program, 0.0, P)
    g = Sums(g.s, tl.where(program.block == 0, g.z, 0.0))  # one block counts the normalizer's

    for i in range(tl.cdiv(x.T, PART)):
        # From the last part to the first.
        start = (tl.cdiv(x.T, PART) - 1 - i) * PART
        stop = tl.minimum(start + PART, x.T)
        span = start // (P.SPAN * P.C)
        at_start = load_state(spans, span, program, NOTHING, P)
        at_start = _after_tokens(at_start, x, span * P.SPAN * P.C, start, program, P)
        for j in range(stop - start):
            t = stop - 1 - j
            before = _after_tokens(at_start, x, start, t, program, P)
            after = _after_tokens(before, x, t, t + 1, program, P)
            g = _store_read(g, g_y, x, t, after, to, program, P)
            _store_written(g, x, t, after, to, program, P)
            left = before if x.log_f is None else _left(before, x, t)
            g = Sums(g.s * _share(left.s, after.s), g.z * _share(left.z, after.z))
            if x.log_f is not None:
                _store(to.log_f, t, program.d, 1, tl.sum(tl.sum(g.s, 1) + g.z, 0))

    if to.state is not None:
        store_state(to.state, 0, g.s, g.z, program, P)


@triton.jit
def _load(head, t, column, D: tl.constexpr, fill=NOTHING):
    """Load columns of token t of a head; `fill` beyond its D columns."""
    token = head.pointer + t * tl.cast(head.stride, tl.int64)
    return tl.load(token + column, mask=column < D, other=fill).to(tl.float64)


@triton.jit
def _store(head, t, column, D: tl.constexpr, x):
    """Undo `_load`."""
    if head.pointer.dtype.element_ty != tl.float64:
        x = x.to(tl.float32)  # only float32 converts to bfloat16
    token = head.pointer + t * tl.cast(head.stride, tl.int64)
    tl.store(token + column, x.to(head.pointer.dtype.element_ty), mask=column < D)


@triton.jit
def _spans_of(saved, g, P: tl.constexpr):
    """Where the states before the spans of head g are."""
    of_head = g * saved.slots * P.D_K
    return Sums(saved.state.s + of_head * P.D_V // P.SPAN, saved.state.z + of_head // P.Z_SPAN)


@triton.jit
def _state(states, program, fill, P: tl.constexpr):
    """The state of the program's head or its gradient; `fill` without one."""
    if states is None:
        return empty(fill, tl.float64, P)
    else:
        state = load_state(states, program.g, program, fill, P)
        return Sums(state.s.to(tl.float64), state.z.to(tl.float64))


@triton.jit
def _after_tokens(state, x, start, stop, program, P: tl.constexpr):
    """Return the state after tokens `start` to `stop` of a head, given the state before them."""
    for t in range(start, stop):
        if x.log_f is not None:
            state = _left(state, x, t)
        k_t = _load(x.k, t, program.d, P.D_K)
        v_t = _load(x.log_v, t, program.e, P.D_V)
        state = Sums(_logaddexp(state.s, k_t[:, None] + v_t[None, :]), _logaddexp(state.z, k_t))
    return state


@triton.jit
def _left(state, x, t):
    """What the gates of token t leave of the state."""
    f_t = tl.load(x.log_f.pointer + t * tl.cast(x.log_f.stride, tl.int64)).to(tl.float64)
    return Sums(state.s + f_t, state.z + f_t)


@triton.jit
def _logaddexp(a, b):
    larger = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    smaller = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    return larger + tl.log(1.0 + tl.exp(smaller - finite(larger)))


@triton.jit
def _logsumexp(x):
    """Over the features of keys, the first dimension."""
    largest = tl.max(x, 0)
    return largest + tl.log(tl.sum(tl.exp(x - finite(largest)), 0))


@triton.jit
def _share(term, log_sum):
    """exp(term - log_sum) for a term of a log-sum, between 0 and 1; 0 for an empty sum."""
    return tl.exp(term - finite(log_sum))


@triton.jit
def _store_read(g, g_y, x, t, state, to, program, P: tl.constexpr):
    """Store the gradient of query t, and add that of the state that it reads to g."""
    q_t = _load(x.q, t, program.d, P.D_K)
    g_t = _load(g_y, t, program.e, P.D_V, 0.0)
    log_S = _logsumexp(q_t[:, None] + state.s)
    log_Z = _logsumexp(q_t + state.z)
    read = g_t[None, :] * _share(q_t[:, None] + state.s, log_S[None, :])
    read_z = -tl.sum(g_t, 0) * _share(q_t + state.z, log_Z)
    _store(to.q, t, program.d, P.D_K, tl.sum(read, 1) + read_z)
    return Sums(g.s + read, g.z + read_z)


@triton.jit
def _store_written(g, x, t, state, to, program, P: tl.constexpr):
    """Store the gradients of key and value t, given that of the state with them."""
    k_t = _load(x.k, t, program.d, P.D_K)
    v_t = _load(x.log_v, t, program.e, P.D_V)
    written = g.s * _share(k_t[:, None] + v_t[None, :], state.s)
    written_z = g.z * _share(k_t, state.z)
    _store(to.k, t, program.d, P.D_K, tl.sum(written, 1) + written_z)
    _store(to.log_v, t, program.e, P.D_V, tl.sum(written, 0))
