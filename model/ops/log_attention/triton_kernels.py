"""`chunked.py` as one kernel for each pass: a program carries the state of a head through its
chunks, on the chip.

A program computes one head g and one block of value columns e. It reads and writes only the
operator's arguments and results, and for the backward pass the state every C tokens. Names are
those of chunked.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from model.ops.log_attention.triton_arguments import (
    Saved,
    Sums,
    any_of,
    chunks_of,
    empty,
    gates_of_segment,
    gradients_of,
    head_of,
    heads_of,
    load_chunk,
    load_state,
    program_of,
    store_chunk,
    store_gates,
    store_state,
)
from model.ops.log_attention.triton_math import (
    INTERPRETED,
    LOG2E,
    LOST,
    NOTHING,
    after_gates,
    applied,
    between,
    finite,
    frame_above,
    gates_gradient,
    gates_of,
    is_doubtful,
    key_factor,
    left_after_resets,
    log_of_scaled,
    once,
    power_of_two,
    product,
    reciprocal,
    scaled_exp,
    times,
    weigh,
)


class State(NamedTuple):
    """The sums so far, and the frames in which they are."""

    M: Any
    """(BK, BV)."""
    z: Any
    """(BK,)."""
    key: Any
    """(BK,)."""
    value: Any
    """(BV,)."""


@triton.jit
def forward_sweep(x, outputs, saved, doubtful, segments, OWN: tl.constexpr, P: tl.constexpr):
    """Write log_y, the state after, which tiles are doubtful, and if there is `saved` the state
    before each chunk.

    OWN: write only what the program's segment adds to an empty state.
    """
    program = program_of(P)
    N = tl.cdiv(x.T, P.C)
    x = heads_of(x, program.g)
    log_y = head_of(outputs.log_y, program.g, x.H)
    doubtful += program.g * (N + 1) * P.BLOCKS + program.block
    if saved is not None:
        saved = _slots_of(saved, program.g, P)

    state = _first_state(x, program, P)
    if segments is not None and not OWN:
        state = _after_segments(state, x, segments, program, P)
    first, stop = chunks_of(segments, N)
    for n in tl.range(first, stop, disable_licm=True):  # what is hoisted would take registers
        gates = gates_of(x.log_f, n, x.T, P)
        k = _keys(x, n, program, P)
        log_v = _values(x, n, program, P)
        # The chunk's frames are above the keys and values so far, its own included.
        key = tl.maximum(state.key, frame_above(tl.max(k, 0) * LOG2E, P.OPERAND))
        value = tl.maximum(state.value, frame_above(tl.max(log_v, 0) * LOG2E, P.OPERAND))
        left_k = left_after_resets(gates, k)
        left_v = left_after_resets(gates, log_v)
        decay = power_of_two(state.key - finite(key))  # at most 1
        M = state.M * (decay[:, None] * power_of_two(state.value - finite(value))[None, :])
        scaled = State(M, state.z * decay, key, value)
        e_k = _exp_in_frame(k, key, P)
        e_v = _exp_in_frame(log_v, value, P)
        if saved is not None:
            _save(saved, n, scaled, program, P)
        if not OWN:
            unsure = _write_outputs(log_y, x, n, state, scaled, e_k, e_v, gates, program, P)
            tl.store(doubtful + n * P.BLOCKS, unsure)
        state = _after_chunk(scaled, e_k, e_v, gates, left_k, left_v, P)

    if OWN:
        slots = _slots_of(segments.sums, program.g, P)
        _save(slots, tl.program_id(1), state, program, P)
    elif stop == N:
        if saved is not None:
            _save(saved, N, state, program, P)
        lost = 0
        if outputs.state is not None:
            lost = _write_final_state(outputs.state, state, program, P)
        tl.store(doubtful + N * P.BLOCKS, lost)


@triton.jit
def _write_outputs(log_y, x, n, before, scaled, e_k, e_v, gates, program, P: tl.constexpr):
    """Write log_y of chunk n, and return whether it is doubtful.

    Args:
        before: the state before the chunk, in the frames before it.
        scaled: the same state in the frames of the chunk.
    """
    e_q = _exp_of_queries(x, n, scaled.key, program, P)
    A = product(e_q, tl.trans(e_k), P)
    z_read = tl.sum(e_q.to(P.ACC) * scaled.z[None, :], 1)
    _, sums, z_sums = _causal_sums(A, between(gates, A), e_q, e_v, scaled.M, z_read, gates, P)
    # log_y = log(sums / z_sums) + value ln 2.
    y = log_of_scaled(sums * (1.0 / z_sums)[:, None], finite(scaled.value)[None, :])
    store_chunk(y, log_y, n, x.T, program.e, P.D_V, P)
    unsure = 0
    if _some_doubtful(sums, z_sums, n, x, program, P):
        terms, z_terms = _visible_terms(x, n, before, gates, program, P)
        unsure |= _is_term_lost(sums, z_sums, terms, z_terms, n, x, program, P)
    return unsure


@triton.jit
def _after_chunk(state, e_k, e_v, gates, left_k, left_v, P: tl.constexpr):
    """Return the state after a chunk: M + e_k^T e_v, in the frames that gates and resets leave."""
    to_end = times(e_k, gates.end)
    M = times(state.M, gates.total) + product(tl.trans(to_end), e_v, P)
    z = times(state.z, gates.total) + tl.sum(to_end.to(P.ACC), 0)
    if left_k is None:
        return State(M, z, state.key, state.value)
    else:
        key = tl.where(left_k, state.key, NOTHING)
        value = tl.where(left_v, state.value, NOTHING)
        key_after = after_gates(key, z, P)
        decay = key_factor(gates, key, key_after, P)
        return State(M * decay[:, None], z * decay, key_after, value)


@triton.jit
def _write_final_state(to, state, program, P: tl.constexpr):
    """Write the logarithm of a state, and return whether it is doubtful."""
    M, z, key, value = state
    has_key = key > NOTHING
    has_term = has_key[:, None] & (value > NOTHING)[None, :]
    lost = _largest((has_term & is_doubtful(M, P.CERTAIN)).to(tl.int32))
    lost |= tl.max((has_key & is_doubtful(z, P.CERTAIN)).to(tl.int32))
    log_s = log_of_scaled(M, finite(key)[:, None] + finite(value)[None, :])
    log_z = log_of_scaled(z, finite(key))
    store_state(to, program.g, log_s, log_z, program, P)
    return lost


@triton.jit
def backward_sweep(g_of, x, saved, doubtful, to, segments, OWN: tl.constexpr, P: tl.constexpr):
    """Write gradients `to`, from the last chunk to the first, given those of outputs, `g_of`.

    The formulas are those of _step_backward in chunked.py, with z and g_z for the last column. The
    loop carries g_M and g_z. For chunk n they begin as the gradients of the state after it, in the
    frames after it, and end as those of the state before it, in the chunk's frames.

    OWN: write only the gradient of the state before the program's segment, through the segment's
    own results.
    """
    program = program_of(P)
    N = tl.cdiv(x.T, P.C)
    if any_of(doubtful + program.g * (N + 1) * P.BLOCKS, (N + 1) * P.BLOCKS):
        return  # exact_backward computes this head
    x = heads_of(x, program.g)
    to = gradients_of(to, program, P)
    g_y = head_of(g_of.log_y, program.g, x.H)
    saved = _slots_of(saved, program.g, P)

    first, stop = chunks_of(segments, N)
    g = _grad_of_final_state(None if OWN else g_of.state, saved, N, program, P)
    if segments is not None and not OWN:
        g = _before_segments(g, x, saved, segments, program, P)
    g_M, g_z, key, value = g
    for i in tl.range(stop - first, disable_licm=True):
        n = stop - 1 - i
        # Compute the chunk again, as `forward_sweep` does.
        gates = gates_of(x.log_f, n, x.T, P)
        M, z, key, value = _saved(saved, n, program, P)
        e_k = _exp_in_frame(_keys(x, n, program, P), key, P)
        to_end = times(e_k, gates.end)
        e_v = _exp_in_frame(_values(x, n, program, P), value, P)
        e_q = _exp_of_queries(x, n, key, program, P)
        A = product(e_q, tl.trans(e_k), P)
        within = between(gates, A)
        A, sums, z_sums = _causal_sums(A, within, e_q, e_v, M, applied(e_q, z, P), gates, P)

        # log_y = log(sums / z_sums), and sums = e_q M + A e_v.
        g_n = load_chunk(g_y, n, x.T, program.e, 0.0, P.D_V, P)  # (C, BV)
        g_sums = _divide(g_n, sums)
        g_z_sums = _divide(-tl.sum(g_n, 1), z_sums)
        g_read = times(g_sums, gates.start).to(P.OPERAND)  # of e_q M
        g_z_read = times(g_z_sums, gates.start)
        g_sums = g_sums.to(P.OPERAND)
        g_A = product(g_sums, tl.trans(e_v), P) + g_z_sums[:, None]
        g_A = weigh(g_A, within).to(P.OPERAND)  # (C, C)

        # The gradient of M: from the state after the chunk to the one before it.
        g_M, g_z, g_after, key, value = _grad_in_frames_of(n, g_M, g_z, saved, gates, program, P)
        if not OWN:
            g_rows = _write_grad_of_keys_and_values(
                to, n, x.T, e_q, e_k, e_v, to_end, A, g_A, g_sums, g_M, g_z, gates, program, P
            )
        g_M = times(g_M, gates.total) + product(tl.trans(e_q), g_read, P)
        g_z = times(g_z, gates.total) + applied(tl.trans(e_q), g_z_read, P)
        if not OWN:
            # g_q = (g_read M^T + g_A e_k) e_q.
            M, z = load_state(saved.state, n, program, 0.0, P)
            g_q = product(g_read, tl.trans(M), P) + g_z_read[:, None] * z[None, :]
            g_q += product(g_A, e_k, P)
            g_q *= e_q.to(P.ACC)
            store_chunk(g_q, to.q, n, x.T, program.d, P.D_K, P)
            if x.log_f is not None:
                g_f = gates_gradient(g_rows + tl.sum(g_q, 1), g_after, gates)
                store_gates(g_f, to.log_f, n, x.T, P)

    if OWN:
        store_state(_own_gradients(segments, program, P), tl.program_id(1), g_M, g_z, program, P)
    elif x.state is not None:
        if first == 0:
            s, norm = load_state(x.state, program.g, program, NOTHING, P)
            g_s = g_M * scaled_exp(s, finite(key)[:, None] + finite(value)[None, :], P.ACC)
            store_state(to.state, 0, g_s, g_z * scaled_exp(norm, finite(key), P.ACC), program, P)


@triton.jit
def _grad_of_final_state(g_state, saved, N, program, P: tl.constexpr):
    """Return the gradient of M and z after the last chunk, and their frames; 0 if g_state is
    None."""
    M, z, key, value = _saved(saved, N, program, P)
    g_M, g_z = empty(0.0, P.ACC, P)
    if g_state is not None:
        g_s, g_norm = load_state(g_state, program.g, program, 0.0, P)
        g_M = _divide(g_s, M.to(P.ACC))
        if program.block == 0:
            g_z = _divide(g_norm, z)
    return State(g_M, g_z, key, value)


@triton.jit
def _grad_in_frames_of(n, g_M, g_z, saved, gates, program, P: tl.constexpr):
    """Return g_M and g_z in the frames of chunk n, given those in the frames after it.

    Also their product with the state after the chunk, summed over values (BK,), and the frames.
    States and frames are loaded again to save registers.
    """
    M, z, key_after, value_after = _saved(saved, n + 1, program, P)
    g_after = tl.sum(g_M * M.to(P.ACC), 1) + g_z * z
    _, _, key, value = _saved(saved, n, program, P)
    decay = key_factor(gates, key, key_after, P)
    value_step = value - finite(value_after)
    if gates.total is not None:
        # After a reset a frame can shrink, but then there is nothing to scale.
        value_step = tl.minimum(value_step, 0.0)
    g_M *= decay[:, None] * power_of_two(value_step)[None, :]
    return g_M, g_z * decay, g_after, key, value


@triton.jit
def _write_grad_of_keys_and_values(
    to, n, T, e_q, e_k, e_v, to_end, A, g_A, g_sums, g_M, g_z, gates, program, P: tl.constexpr
):
    """Write the gradients of a chunk's keys and values, which its queries read, and later ones
    through M. Return the sums of -g_k over features (C,), for the gates."""
    # g_v = (to_end g_M + A^T g_sums) e_v.
    g_v = product(to_end, g_M, P)
    g_v += product(tl.trans(A), g_sums, P)
    store_chunk(g_v * e_v.to(P.ACC), to.log_v, n, T, program.e, P.D_V, P)
    # g_k = (e_v g_M^T end + g_A^T e_q) e_k.
    g_k = times(product(e_v, tl.trans(g_M), P) + once(g_z, P)[None, :], gates.end)
    g_k += product(tl.trans(g_A), e_q, P)
    g_k *= e_k.to(P.ACC)
    store_chunk(g_k, to.k, n, T, program.d, P.D_K, P)
    return -tl.sum(g_k, 1)


@triton.jit
def _after_segments(state, x, segments, program, P: tl.constexpr):
    """Return the state before this program's segment, given that before the first."""
    M, z, key, value = state
    slots = _slots_of(segments.sums, program.g, P)
    for s in range(tl.program_id(1)):
        log_f = gates_of_segment(x, segments, s, program.g)
        key_before = key
        value_before = value
        M_s, z_s, key_s, value_s = _saved(slots, s, program, P)
        if log_f is None:
            key = tl.maximum(key, key_s)
            value = tl.maximum(value, value_s)
        else:
            key = tl.maximum(frame_above(key + log_f * LOG2E, P.OPERAND), key_s)
            # A column without values in the segment keeps its frame, unless there is a reset.
            value_left = tl.where(log_f > NOTHING, value, NOTHING)
            value = tl.where(value_s > NOTHING, tl.maximum(value, value_s), value_left)
        decay, value_decay = _across(key_before, key, value_before, value, log_f)
        decay_s = power_of_two(key_s - finite(key))
        M = M * decay[:, None] * value_decay[None, :]
        M += M_s * decay_s[:, None] * power_of_two(value_s - finite(value))[None, :]
        z = z * decay + z_s * decay_s
    return State(M, z, key, value)


@triton.jit
def _before_segments(g, x, saved, segments, program, P: tl.constexpr):
    """Return the gradient of the state after this program's segment, given that after the last, and
    their frames."""
    g_M, g_z, key, value = g
    last = tl.num_programs(1) - 1
    for i in range(last - tl.program_id(1)):
        s = last - i
        log_f = gates_of_segment(x, segments, s, program.g)
        key_after = key
        value_after = value
        _, _, key, value = _saved(saved, s * segments.chunks, program, P)
        g_M_s, g_z_s = load_state(_own_gradients(segments, program, P), s, program, 0.0, P)
        decay, value_decay = _across(key, key_after, value, value_after, log_f)
        g_M = g_M * decay[:, None] * value_decay[None, :] + g_M_s
        g_z = g_z * decay + g_z_s
    return State(g_M, g_z, key, value)


@triton.jit
def _own_gradients(segments, program, P: tl.constexpr):
    """Where the gradients of a program's segments are: each block of value columns has its part of
    the normalizer's."""
    state = segments.sums.state
    keys = segments.sums.slots * P.D_K
    return Sums(state.s + program.g * keys * P.D_V, state.z + program.part * keys)


@triton.jit
def _across(key, key_after, value, value_after, log_f):
    """The factors (BK,) and (BV,) of a segment, from M before it to what is left of it in the
    frames after it."""
    shift = key - finite(key_after)
    decay = power_of_two(shift) if log_f is None else tl.exp2(shift + log_f * LOG2E)
    # After a reset a frame can shrink, but then there is nothing to scale.
    return decay, power_of_two(tl.minimum(value - finite(value_after), 0.0))


@triton.jit
def _keys(x, n, program, P: tl.constexpr):
    """The keys of chunk n (C, BK)."""
    return load_chunk(x.k, n, x.T, program.d, NOTHING, P.D_K, P)


@triton.jit
def _values(x, n, program, P: tl.constexpr):
    """log_v of chunk n (C, BV)."""
    return load_chunk(x.log_v, n, x.T, program.e, NOTHING, P.D_V, P)


@triton.jit
def _exp_in_frame(x, frame, P: tl.constexpr):
    """e_k or e_v: exp(x) 2^-frame of x (C, .), with a frame for each column."""
    return once(scaled_exp(x, finite(frame)[None, :], P.OPERAND).to(P.OPERAND), P)


@triton.jit
def _exp_of_queries(x, n, key, program, P: tl.constexpr):
    """Return e_q of chunk n (C, BK): scaled by a power of two for each row, including the frame of
    the keys."""
    q = load_chunk(x.q, n, x.T, program.d, 0.0, P.D_K, P)
    row = frame_above(tl.max(q * LOG2E + key[None, :], 1), P.OPERAND)
    # With a lost key, e_q is 0 as well.
    row = tl.where(tl.maximum(row, tl.max(key, 0)) == LOST, 2 * LOST, row)
    return once(scaled_exp(q, finite(row)[:, None] - key[None, :], P.OPERAND).to(P.OPERAND), P)


@triton.jit
def _causal_sums(A, within, e_q, e_v, M, z_read, gates, P: tl.constexpr):
    """Return A = tril(e_q e_k^T) (C, C), weighed, the sums (C, BV) and those of the normalizer
    (C,)."""
    A = weigh(A, within)
    z_sums = times(z_read, gates.start) + tl.sum(A, 1)
    A = A.to(P.OPERAND)
    sums = times(product(e_q, M, P), gates.start) + product(A, e_v, P)
    return A, sums, z_sums


@triton.jit
def _first_state(x, program, P: tl.constexpr):
    """Return the state before the first token."""
    if x.state is None:
        M, z = empty(0.0, P.ACC, P)
        key = tl.full(program.d.shape, NOTHING, P.ACC)
        value = tl.full(program.e.shape, NOTHING, P.ACC)
    else:
        s, z = load_state(x.state, program.g, program, NOTHING, P)
        key = frame_above(z * LOG2E, P.OPERAND)
        value = frame_above(tl.max(s - finite(z)[:, None], 0) * LOG2E, P.OPERAND)
        M = scaled_exp(s, finite(key)[:, None] + finite(value)[None, :], P.ACC)
        z = scaled_exp(z, finite(key), P.ACC)
    return State(M, z, key, value)


@triton.jit
def _slots_of(saved, g, P: tl.constexpr):
    """What is saved of head g."""
    keys = g * saved.slots * P.D_K
    state = Sums(saved.state.s + keys * P.D_V, saved.state.z + keys)
    return Saved(state, saved.key + keys, saved.value + g * saved.slots * P.D_V, saved.slots)


@triton.jit
def _save(saved, n, state, program, P: tl.constexpr):
    """Store a state in slot n."""
    store_state(saved.state, n, state.M, state.z, program, P)
    tl.store(saved.key + n * P.D_K + program.d, state.key, mask=program.d < P.D_K)
    tl.store(saved.value + n * P.D_V + program.e, state.value, mask=program.e < P.D_V)


@triton.jit
def _saved(saved, n, program, P: tl.constexpr):
    """Undo `_save`."""
    M, z = load_state(saved.state, n, program, 0.0, P)
    key = tl.load(saved.key + n * P.D_K + program.d, mask=program.d < P.D_K, other=NOTHING)
    value = tl.load(saved.value + n * P.D_V + program.e, mask=program.e < P.D_V, other=NOTHING)
    return State(M, z, key, value)


@triton.jit
def _some_doubtful(sums, z_sums, n, x, program, P: tl.constexpr):
    """Whether any sum of the tile is doubtful, including empty sums."""
    small = is_doubtful(sums, P.CERTAIN)
    if P.D_V % P.BV != 0:
        small &= (program.e < P.D_V)[None, :]
    small = tl.max(small.to(tl.int32), 1) | is_doubtful(z_sums, P.CERTAIN).to(tl.int32)  # (C,)
    return _largest(tl.where(n * P.C + tl.arange(0, P.C) < x.T, small, 0)) > 0


@triton.jit
def _largest(x):
    """The maximum of all of x.

    For compute capabilities 10 and 11, Triton 3.7 does not compile tl.max of one dimension that
    comes from a product, unless the layout is another: that of one more dimension.
    """
    if not INTERPRETED and cuda_capability_geq(10) and not cuda_capability_geq(12):
        if len(x.shape) == 2:
            x = tl.max(x, 1)
        return tl.max(tl.max(x[None, :], 1), 0)
    else:
        return tl.max(x)


@triton.jit
def _visible_terms(x, n, before, gates, program, P: tl.constexpr):
    """Which sums of chunk n (C, BV), and of the normalizer (C,), have a term.

    A term of a query is a key and value that are not masked, at or before it, with no reset in
    between. Terms of earlier chunks show in `before`, as frames that are not -inf.
    """
    k = _keys(x, n, program, P)  # loaded again to save registers
    log_v = _values(x, n, program, P)
    t = tl.arange(0, P.C)
    has_key = tl.max((k != NOTHING).to(tl.int32), 1) > 0  # (C,); NaN is a term
    has_value = has_key[:, None] & (log_v != NOTHING)
    # The first query that sees a term of an earlier chunk, without resets: 0, or C for none.
    before_k = tl.where(tl.max(before.key, 0) > NOTHING, 0, P.C)
    before_v = tl.where(before.value > NOTHING, before_k, P.C)  # (BV,)
    if gates.log_f is None:  # all queries from the first term on
        first_k = tl.minimum(tl.min(tl.where(has_key, t, P.C), 0), before_k)
        first_v = tl.minimum(tl.min(tl.where(has_value, t[:, None], P.C), 0), before_v)
        return t[:, None] >= first_v[None, :], t >= first_k
    else:
        n_resets = gates.n_resets
        sees_before = n_resets == 0
        # (C, C): no reset is between query and key.
        visible = (n_resets[:, None] == n_resets[None, :]) & (t[:, None] >= t[None, :])
        # Without `once`, Triton 3.7 does not compile it for 64 keys and 32 values on compute
        # capability 8.0. Triton's interpreter takes the bits of a truth value for those of a
        # bfloat16, unless they pass through another type.
        sees = once(visible.to(P.ACC).to(P.OPERAND), P)
        values = once(has_value.to(P.ACC).to(P.OPERAND), P)
        terms = product(sees, values, P) > 0.0
        z_terms = tl.max((visible & has_key[None, :]).to(tl.int32), 1) > 0
        terms |= sees_before[:, None] & (before_v == 0)[None, :]
        z_terms |= sees_before & (before_k == 0)
        return terms, z_terms


@triton.jit
def _is_term_lost(sums, z_sums, terms, z_terms, n, x, program, P: tl.constexpr):
    """Whether a sum that has terms is doubtful. An empty sum is 0, and certain."""
    here = (n * P.C + tl.arange(0, P.C) < x.T)[:, None] & (program.e < P.D_V)[None, :]
    small = is_doubtful(sums, P.CERTAIN) & terms
    small |= (is_doubtful(z_sums, P.CERTAIN) & z_terms)[:, None]
    return _largest((small & here).to(tl.int32))


@triton.jit
def _divide(a, b):
    """a / b; 0 for an empty sum b."""
    return tl.where(b == 0.0, 0.0, a * reciprocal(b))
