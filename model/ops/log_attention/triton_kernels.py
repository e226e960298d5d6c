"""`chunked.py` as one kernel for each pass: a program carries the state of a head through its chunks, on the chip.

A program computes one head g and one block of value columns e. It reads and writes only the operator's arguments and
results, and for the backward pass the state every C tokens. Names are those of chunked.py.
"""

import triton
import triton.language as tl

from model.ops.log_attention.triton_frames import (
    LOG2E,
    LOST,
    NOTHING,
    any_of,
    exp_measured,
    finite,
    frame_of,
    head_of,
    is_doubtful,
    load_chunk,
    log_of_scaled,
    packed_head,
    power_of_two,
    product,
    store_chunk,
)


@triton.jit
def forward_sweep(
    q,  # (B, H, T, D_K), and so on: see triton.py
    k,
    log_v,
    log_s,
    log_z,
    log_y,
    log_s_after,
    log_z_after,
    M_at,
    z_at,
    key_at,
    value_at,
    doubtful,
    q_strides,
    k_strides,
    v_strides,
    H,
    T,
    S,
    slots,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_STATE: tl.constexpr,
    WANT_STATE: tl.constexpr,
    SAVE: tl.constexpr,
    OPERAND: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CERTAIN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write log_y, the state after, which tiles are doubtful, and if SAVE the state before each chunk."""
    blocks: tl.constexpr = (D_V + BV - 1) // BV
    g, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    d, e = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    N, tiles = tl.cdiv(S, C), tl.cdiv(T, C)
    last = N if CAUSAL else 0  # slot of the state after all keys
    q, k, log_v = head_of(q, q_strides, g, H), head_of(k, k_strides, g, H), head_of(log_v, v_strides, g, H)
    log_y, doubtful = packed_head(log_y, g, T, H, D_V), doubtful + g * (tiles + 1) * blocks + block
    M_at, z_at, key_at = M_at + g * slots * D_K * D_V, z_at + g * slots * D_K, key_at + g * slots * D_K
    value_at = value_at + g * slots * D_V

    key, value = tl.full((BK,), NOTHING, ACC), tl.full((BV,), NOTHING, ACC)
    M, z = tl.zeros((BK, BV), ACC), tl.zeros((BK,), ACC)
    if HAS_STATE:
        key, value, M, z = _first_state(log_s + g * D_K * D_V, log_z + g * D_K, d, e, D_K, D_V, OPERAND, ACC)

    for n in tl.range(N, num_stages=STAGES):
        k_n = load_chunk(k, k_strides[2], n * C, S, d, D_K, NOTHING, C, ACC)  # (C, BK)
        v_n = load_chunk(log_v, v_strides[2], n * C, S, e, D_V, NOTHING, C, ACC)  # (C, BV)
        key_before, value_before = key, value
        key = tl.maximum(key, frame_of(tl.max(k_n, 0) * LOG2E, OPERAND))
        value = tl.maximum(value, frame_of(tl.max(v_n, 0) * LOG2E, OPERAND))
        decay = power_of_two(key_before - finite(key))  # at most 1
        M *= decay[:, None] * power_of_two(value_before - finite(value))[None, :]
        z *= decay
        e_k = exp_measured(k_n, finite(key)[None, :], OPERAND).to(OPERAND)
        e_v = exp_measured(v_n, finite(value)[None, :], OPERAND).to(OPERAND)
        if CAUSAL:
            if SAVE:
                _save(M_at, z_at, key_at, value_at, n, M, z, key, value, block, d, e, D_K, D_V)
            q_n = load_chunk(q, q_strides[2], n * C, T, d, D_K, 0.0, C, ACC)  # (C, BK)
            e_q = exp_of_queries(q_n, key, OPERAND)
            _, sums, z_sums = _causal_sums(e_q, e_k, e_v, M, z, OPERAND, PRECISION, ACC)  # (C, BV), (C,)
            _store_log_y(log_y, sums, z_sums, value, n, T, H, e, D_V, C)
            unsure = 0
            if _some_doubtful(sums, z_sums, n, T, e, D_V, BV, C, CERTAIN):
                k_n = load_chunk(k, k_strides[2], n * C, S, d, D_K, NOTHING, C, ACC)  # loaded again to save registers
                v_n = load_chunk(log_v, v_strides[2], n * C, S, e, D_V, NOTHING, C, ACC)
                first_k, first_v = _first_of_chunk(k_n, v_n, key_before, value_before, C)
                unsure = _lacks_something(sums, z_sums, first_k, first_v, n, T, e, D_V, C, CERTAIN)
            tl.store(doubtful + n * blocks, unsure)
        M += product(tl.trans(e_k), e_v, OPERAND, PRECISION, ACC)
        z += tl.sum(e_k.to(ACC), 0)

    if SAVE:
        _save(M_at, z_at, key_at, value_at, last, M, z, key, value, block, d, e, D_K, D_V)
    if not CAUSAL:
        for n in tl.range(tiles, num_stages=STAGES):
            q_n = load_chunk(q, q_strides[2], n * C, T, d, D_K, 0.0, C, ACC)  # (C, BK)
            e_q = exp_of_queries(q_n, key, OPERAND)
            sums = product(e_q, M, OPERAND, PRECISION, ACC)  # (C, BV)
            z_sums = tl.sum(e_q.to(ACC) * z[None, :], 1)  # (C,)
            _store_log_y(log_y, sums, z_sums, value, n, T, H, e, D_V, C)
            unsure = 0
            if _some_doubtful(sums, z_sums, n, T, e, D_V, BV, C, CERTAIN):
                first_k, first_v = _first_if_seen(key, value, C)
                unsure = _lacks_something(sums, z_sums, first_k, first_v, n, T, e, D_V, C, CERTAIN)
            tl.store(doubtful + n * blocks, unsure)

    lost = 0
    if WANT_STATE:
        seen = (key > NOTHING)[:, None] & (value > NOTHING)[None, :]
        lost = tl.max((seen & is_doubtful(M, CERTAIN)).to(tl.int32))
        lost |= tl.max(((key > NOTHING) & is_doubtful(z, CERTAIN)).to(tl.int32))
        here = (d < D_K)[:, None] & (e < D_V)[None, :]
        log_M = log_of_scaled(M, finite(key)[:, None] + finite(value)[None, :])
        tl.store(log_s_after + g * D_K * D_V + d[:, None] * D_V + e[None, :], log_M, mask=here)
        tl.store(log_z_after + g * D_K + d, log_of_scaled(z, finite(key)), mask=(d < D_K) & (block == 0))
    tl.store(doubtful + tiles * blocks, lost)


@triton.jit
def backward_sweep(
    g_y,
    g_log_s_after,
    g_log_z_after,
    q,
    k,
    log_v,
    log_s,
    log_z,
    M_at,
    z_at,
    key_at,
    value_at,
    doubtful,
    g_q,
    g_k,
    g_v,
    g_log_s,
    g_log_z,
    y_strides,
    q_strides,
    k_strides,
    v_strides,
    H,
    T,
    S,
    slots,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_STATE: tl.constexpr,
    WANT_STATE: tl.constexpr,
    OPERAND: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write gradients, from the last chunk to the first: g_M is for the state after a chunk."""
    blocks: tl.constexpr = (D_V + BV - 1) // BV
    g, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    d, e = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    N, tiles = tl.cdiv(S, C), tl.cdiv(T, C)
    last = N if CAUSAL else 0  # slot of the state after all keys
    if any_of(doubtful + g * (tiles + 1) * blocks, (tiles + 1) * blocks):
        return  # exact_backward computes this head
    q, k, log_v = head_of(q, q_strides, g, H), head_of(k, k_strides, g, H), head_of(log_v, v_strides, g, H)
    g_y = head_of(g_y, y_strides, g, H)
    part = block * (tl.num_programs(0) // blocks).to(tl.int64)  # of the sum over blocks
    g_q, g_k = packed_head(g_q + part * T * D_K, g, T, H, D_K), packed_head(g_k + part * S * D_K, g, S, H, D_K)
    g_v = packed_head(g_v, g, S, H, D_V)
    M_at, z_at, key_at = M_at + g * slots * D_K * D_V, z_at + g * slots * D_K, key_at + g * slots * D_K
    value_at = value_at + g * slots * D_V
    of_state, state_mask = d[:, None] * D_V + e[None, :], (d < D_K)[:, None] & (e < D_V)[None, :]

    M, z, key, value = _saved(M_at, z_at, key_at, value_at, last, d, e, D_K, D_V)
    g_M, g_z = tl.zeros((BK, BV), ACC), tl.zeros((BK,), ACC)
    if WANT_STATE:
        g_s = tl.load(g_log_s_after + g * D_K * D_V + of_state, mask=state_mask, other=0.0)
        M_after = M.to(ACC)
        g_M = tl.where(M_after == 0.0, 0.0, g_s / tl.where(M_after == 0.0, 1.0, M_after))
        if block == 0:
            g_n = tl.load(g_log_z_after + g * D_K + d, mask=d < D_K, other=0.0)
            g_z = tl.where(z == 0.0, 0.0, g_n / tl.where(z == 0.0, 1.0, z))

    if not CAUSAL:
        for n in tl.range(tiles, num_stages=STAGES):
            q_n = load_chunk(q, q_strides[2], n * C, T, d, D_K, 0.0, C, ACC)  # (C, BK)
            g_n = load_chunk(g_y, y_strides[2], n * C, T, e, D_V, 0.0, C, ACC)  # (C, BV)
            e_q = exp_of_queries(q_n, key, OPERAND)
            sums, z_sums = product(e_q, M, OPERAND, PRECISION, ACC), tl.sum(e_q.to(ACC) * z[None, :], 1)
            g_sums, g_z_sums = _gradient_of_sums(g_n, sums, z_sums, OPERAND)
            to_q = product(g_sums, tl.trans(M), OPERAND, PRECISION, ACC) + g_z_sums[:, None] * z[None, :]
            store_chunk(to_q * e_q.to(ACC), g_q, H * D_K, n * C, T, d, D_K, C)
            g_M += product(tl.trans(e_q), g_sums, OPERAND, PRECISION, ACC)
            g_z += tl.sum(e_q.to(ACC) * g_z_sums[:, None], 0)

    for i in tl.range(N, num_stages=STAGES):
        n = N - 1 - i
        k_n = load_chunk(k, k_strides[2], n * C, S, d, D_K, NOTHING, C, ACC)  # (C, BK)
        v_n = load_chunk(log_v, v_strides[2], n * C, S, e, D_V, NOTHING, C, ACC)  # (C, BV)
        if CAUSAL:
            M, z, key_n, value_n = _saved(M_at, z_at, key_at, value_at, n, d, e, D_K, D_V)
            decay = power_of_two(key_n - finite(key))  # at most 1
            g_M *= decay[:, None] * power_of_two(value_n - finite(value))[None, :]
            g_z *= decay
            key, value = key_n, value_n
        e_k = exp_measured(k_n, finite(key)[None, :], OPERAND).to(OPERAND)
        e_v = exp_measured(v_n, finite(value)[None, :], OPERAND).to(OPERAND)
        if CAUSAL:
            q_n = load_chunk(q, q_strides[2], n * C, T, d, D_K, 0.0, C, ACC)  # (C, BK)
            g_n = load_chunk(g_y, y_strides[2], n * C, T, e, D_V, 0.0, C, ACC)  # (C, BV)
            e_q = exp_of_queries(q_n, key, OPERAND)
            A, sums, z_sums = _causal_sums(e_q, e_k, e_v, M, z, OPERAND, PRECISION, ACC)
            g_sums, g_z_sums = _gradient_of_sums(g_n, sums, z_sums, OPERAND)
            g_A = product(g_sums, tl.trans(e_v), OPERAND, PRECISION, ACC) + g_z_sums[:, None]
            g_A = _lower(g_A).to(OPERAND)  # (C, C)
            to_q = product(g_sums, tl.trans(M), OPERAND, PRECISION, ACC) + g_z_sums[:, None] * z[None, :]
            to_q += product(g_A, e_k, OPERAND, PRECISION, ACC)
            store_chunk(to_q * e_q.to(ACC), g_q, H * D_K, n * C, T, d, D_K, C)
        to_v = product(e_k, g_M, OPERAND, PRECISION, ACC)  # through later queries, and then the chunk's own
        if CAUSAL:
            to_v += product(tl.trans(A), g_sums, OPERAND, PRECISION, ACC)
        store_chunk(to_v * e_v.to(ACC), g_v, H * D_V, n * C, S, e, D_V, C)
        to_k = product(e_v, tl.trans(g_M), OPERAND, PRECISION, ACC) + g_z[None, :]
        if CAUSAL:
            to_k += product(tl.trans(g_A), e_q, OPERAND, PRECISION, ACC)
        store_chunk(to_k * e_k.to(ACC), g_k, H * D_K, n * C, S, d, D_K, C)
        if CAUSAL:
            g_M += product(tl.trans(e_q), g_sums, OPERAND, PRECISION, ACC)
            g_z += tl.sum(e_q.to(ACC) * g_z_sums[:, None], 0)

    if HAS_STATE:
        s = tl.load(log_s + g * D_K * D_V + of_state, mask=state_mask, other=NOTHING)
        z_first = tl.load(log_z + g * D_K + d, mask=d < D_K, other=NOTHING)
        g_s = g_M * exp_measured(s, finite(key)[:, None] + finite(value)[None, :], ACC)
        tl.store(g_log_s + g * D_K * D_V + of_state, g_s, mask=state_mask)
        tl.store(g_log_z + (part + g) * D_K + d, g_z * exp_measured(z_first, finite(key), ACC), mask=d < D_K)


@triton.jit
def exp_of_queries(q, key, OPERAND: tl.constexpr):
    """Return e_q for q (C, BK): scaled by a power of two for each row, including the frame of the keys."""
    row = frame_of(tl.max(q * LOG2E + key[None, :], 1), OPERAND)
    row = tl.where(tl.maximum(row, tl.max(key, 0)) == LOST, 2 * LOST, row)  # e_q is then 0 beside a lost key, too
    return exp_measured(q, finite(row)[:, None] - key[None, :], OPERAND).to(OPERAND)


@triton.jit
def _causal_sums(e_q, e_k, e_v, M, z, OPERAND: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """Return A = tril(e_q e_k^T) (C, C), the sums (C, BV) and those of the normalizer (C,)."""
    A = _lower(product(e_q, tl.trans(e_k), OPERAND, PRECISION, ACC))
    z_sums = tl.sum(e_q.to(ACC) * z[None, :], 1) + tl.sum(A, 1)
    A = A.to(OPERAND)
    return A, product(e_q, M, OPERAND, PRECISION, ACC) + product(A, e_v, OPERAND, PRECISION, ACC), z_sums


@triton.jit
def _lower(A):
    rows = tl.arange(0, A.shape[0])
    return tl.where(rows[:, None] >= rows[None, :], A, 0.0)


@triton.jit
def _first_state(log_s, log_z, d, e, D_K: tl.constexpr, D_V: tl.constexpr, OPERAND: tl.constexpr, ACC: tl.constexpr):
    """Return the frames, M and z of the state before the first token."""
    here = (d < D_K)[:, None] & (e < D_V)[None, :]
    s = tl.load(log_s + d[:, None] * D_V + e[None, :], mask=here, other=NOTHING)  # (BK, BV)
    z = tl.load(log_z + d, mask=d < D_K, other=NOTHING)  # (BK,)
    key, value = frame_of(z * LOG2E, OPERAND), frame_of(tl.max(s - finite(z)[:, None], 0) * LOG2E, OPERAND)
    M = exp_measured(s, finite(key)[:, None] + finite(value)[None, :], ACC)
    return key, value, M, exp_measured(z, finite(key), ACC)


@triton.jit
def _save(M_at, z_at, key_at, value_at, n, M, z, key, value, block, d, e, D_K: tl.constexpr, D_V: tl.constexpr):
    """Store slot n of the tensors for the backward pass."""
    here = (d < D_K)[:, None] & (e < D_V)[None, :]
    M = M.to(M_at.dtype.element_ty)
    tl.store(M_at + n * tl.cast(D_K * D_V, tl.int64) + d[:, None] * D_V + e[None, :], M, mask=here)
    tl.store(z_at + n * D_K + d, z, mask=(d < D_K) & (block == 0))
    tl.store(key_at + n * D_K + d, key, mask=(d < D_K) & (block == 0))
    tl.store(value_at + n * D_V + e, value, mask=e < D_V)


@triton.jit
def _saved(M_at, z_at, key_at, value_at, n, d, e, D_K: tl.constexpr, D_V: tl.constexpr):
    """Undo `_save`."""
    here = (d < D_K)[:, None] & (e < D_V)[None, :]
    M = tl.load(M_at + n * tl.cast(D_K * D_V, tl.int64) + d[:, None] * D_V + e[None, :], mask=here, other=0.0)
    z = tl.load(z_at + n * D_K + d, mask=d < D_K, other=0.0)
    key = tl.load(key_at + n * D_K + d, mask=d < D_K, other=NOTHING)
    return M, z, key, tl.load(value_at + n * D_V + e, mask=e < D_V, other=NOTHING)


@triton.jit
def _store_log_y(log_y, sums, z_sums, value, n, T, H, e, D_V: tl.constexpr, C: tl.constexpr):
    y = log_of_scaled(sums * (1.0 / z_sums)[:, None], finite(value)[None, :])
    store_chunk(y, log_y, H * D_V, n * C, T, e, D_V, C)


@triton.jit
def _some_doubtful(sums, z_sums, n, T, e, D_V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, CERTAIN: tl.constexpr):
    """Whether any sum of the tile is doubtful, including empty sums."""
    small = is_doubtful(sums, CERTAIN)
    if D_V % BV != 0:
        small &= (e < D_V)[None, :]
    small = tl.max(small.to(tl.int32), 1) | is_doubtful(z_sums, CERTAIN).to(tl.int32)  # (C,)
    return tl.max(tl.where(n * C + tl.arange(0, C) < T, small, 0), 0) > 0


@triton.jit
def _first_of_chunk(k, v, key_before, value_before, C: tl.constexpr):
    """Return the chunk's first token with a key, and for each column the first with a nonzero value; C if none."""
    rows = tl.arange(0, C)
    alive = tl.max((k != NOTHING).to(tl.int32), 1) > 0  # (C,); NaN is alive
    first_k = tl.min(tl.where(alive, rows, C), 0)
    first_v = tl.min(tl.where(alive[:, None] & (v != NOTHING), rows[:, None], C), 0)  # (BV,)
    before_k, before_v = _first_if_seen(key_before, value_before, C)
    return tl.minimum(first_k, before_k), tl.minimum(first_v, before_v)


@triton.jit
def _first_if_seen(key, value, C: tl.constexpr):
    """The same for earlier tokens: 0, or C if there are none."""
    first_k = tl.where(tl.max(key, 0) > NOTHING, 0, C)
    return first_k, tl.where(value > NOTHING, first_k, C)


@triton.jit
def _lacks_something(
    sums, z_sums, first_k, first_v, n, T, e, D_V: tl.constexpr, C: tl.constexpr, CERTAIN: tl.constexpr
):
    """Whether a sum with terms is doubtful. An empty sum is 0, and certain."""
    rows = tl.arange(0, C)
    real = (n * C + rows < T)[:, None] & (e < D_V)[None, :]
    small = is_doubtful(sums, CERTAIN) & (rows[:, None] >= first_v[None, :])
    small |= (is_doubtful(z_sums, CERTAIN) & (rows >= first_k))[:, None]
    return tl.max((small & real).to(tl.int32))


@triton.jit
def _gradient_of_sums(g_y, sums, z_sums, OPERAND: tl.constexpr):
    """Return gradients of sums and z_sums from that of log_y = log(sums / z_sums); 0 for empty sums."""
    g_sums = tl.where(sums == 0.0, 0.0, g_y / tl.where(sums == 0.0, 1.0, sums))
    return g_sums.to(OPERAND), tl.where(z_sums == 0.0, 0.0, -tl.sum(g_y, 1) / tl.where(z_sums == 0.0, 1.0, z_sums))
