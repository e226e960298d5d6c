"""`exact.py` as kernels. They are always launched after the fast ones, and return at once unless a head is doubtful.

So the CPU never has to wait for the GPU to learn whether a head is doubtful. As in the fast kernels, a program
computes a head g and a block of value columns e. All numbers are float64.

The backward pass needs the state after every token. It starts from the state that the forward pass stored before a span
of tokens (in the memory of M, where SPAN slots hold a float64 state), steps forward to a part of R tokens, and from
there to each of them. R = sqrt(span) takes the fewest steps.
"""

import triton
import triton.language as tl

from model.ops.log_attention.triton_frames import NOTHING, any_of, finite, head_of, packed_head


@triton.jit
def exact_forward(
    q,
    k,
    log_v,
    log_s,
    log_z,
    log_y,
    log_s_after,
    log_z_after,
    s_at,
    z_at,
    doubtful,
    counter,
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
    SPAN: tl.constexpr,
    Z_SPAN: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_STATE: tl.constexpr,
    WANT_STATE: tl.constexpr,
    SAVE: tl.constexpr,
):
    """Write log_y of doubtful tiles and, for heads with such tiles, the states before each span and at the end."""
    blocks: tl.constexpr = (D_V + BV - 1) // BV
    g, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    tiles = tl.cdiv(T, C)
    doubtful += g * (tiles + 1) * blocks
    if any_of(doubtful, (tiles + 1) * blocks) == 0:
        return
    d, e = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    q, k, log_v = head_of(q, q_strides, g, H), head_of(k, k_strides, g, H), head_of(log_v, v_strides, g, H)
    log_y = packed_head(log_y, g, T, H, D_V)
    s_at, z_at = s_at + g * slots * D_K * D_V // SPAN, z_at + g * slots * D_K // Z_SPAN
    s, z = _first_state(log_s, log_z, g, d, e, D_K, D_V, BK, BV, HAS_STATE)

    repaired = 0
    for n in range(tl.cdiv(S, C)):
        if SAVE and CAUSAL:
            if n % SPAN == 0:
                _store_state(s_at, z_at, n // SPAN, s, z, block, d, e, D_K, D_V)
        for t in range(n * C, tl.minimum(n * C + C, S)):
            s, z = _after_tokens(s, z, k, log_v, k_strides[2], v_strides[2], t, t + 1, d, e, D_K, D_V)
            if CAUSAL:
                if any_of(doubtful + n * blocks, blocks):
                    q_t = _load(q, q_strides[2], t, d, D_K)
                    _store(log_y, H * D_V, t, e, D_V, _log_y(q_t, s, z))
    if not CAUSAL:
        for t in range(T):
            if any_of(doubtful + (t // C) * blocks, blocks):
                q_t = _load(q, q_strides[2], t, d, D_K)
                _store(log_y, H * D_V, t, e, D_V, _log_y(q_t, s, z))
    for n in range(tiles):
        repaired += any_of(doubtful + n * blocks, blocks)
    if block == 0:
        tl.atomic_add(counter, repaired)
    if WANT_STATE:
        _store_state(log_s_after + g * D_K * D_V, log_z_after + g * D_K, 0, s, z, block, d, e, D_K, D_V)


@triton.jit
def exact_backward(
    g_y,
    g_log_s_after,
    g_log_z_after,
    q,
    k,
    log_v,
    log_s,
    log_z,
    s_at,
    z_at,
    doubtful,
    counter,
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
    SPAN: tl.constexpr,
    Z_SPAN: tl.constexpr,
    R: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_STATE: tl.constexpr,
    WANT_STATE: tl.constexpr,
):
    """Write all gradients of doubtful heads. The loop carries g_s, the gradient of the state's logarithm."""
    blocks: tl.constexpr = (D_V + BV - 1) // BV
    g, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    tiles = tl.cdiv(T, C)
    if any_of(doubtful + g * (tiles + 1) * blocks, (tiles + 1) * blocks) == 0:
        return
    d, e = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    q, k, log_v = head_of(q, q_strides, g, H), head_of(k, k_strides, g, H), head_of(log_v, v_strides, g, H)
    g_y = head_of(g_y, y_strides, g, H)
    part = block * (tl.num_programs(0) // blocks).to(tl.int64)  # of the sum over blocks
    g_q, g_k = packed_head(g_q + part * T * D_K, g, T, H, D_K), packed_head(g_k + part * S * D_K, g, S, H, D_K)
    g_v = packed_head(g_v, g, S, H, D_V)
    s_at, z_at = s_at + g * slots * D_K * D_V // SPAN, z_at + g * slots * D_K // Z_SPAN
    if block == 0:
        tl.atomic_add(counter, tiles if CAUSAL else tiles + tl.cdiv(S, C))

    g_s, g_z = tl.zeros((BK, BV), tl.float64), tl.zeros((BK,), tl.float64)
    if WANT_STATE:
        g_s, g_z = _load_state(g_log_s_after + g * D_K * D_V, g_log_z_after + g * D_K, 0, d, e, D_K, D_V, 0.0)
        g_z = tl.where(block == 0, g_z, 0.0)
    first_s, first_z = _first_state(log_s, log_z, g, d, e, D_K, D_V, BK, BV, HAS_STATE)

    if CAUSAL:
        for i in range(tl.cdiv(S, R)):
            part_start = (tl.cdiv(S, R) - 1 - i) * R
            span = part_start // (SPAN * C)
            s, z = _load_state(s_at, z_at, span, d, e, D_K, D_V, NOTHING)
            start = span * SPAN * C
            s_part, z_part = _after_tokens(
                s, z, k, log_v, k_strides[2], v_strides[2], start, part_start, d, e, D_K, D_V
            )
            for j in range(tl.minimum(R, S - part_start)):
                t = tl.minimum(part_start + R, S) - 1 - j
                s, z = _after_tokens(
                    s_part, z_part, k, log_v, k_strides[2], v_strides[2], part_start, t, d, e, D_K, D_V
                )
                k_t, v_t = _load(k, k_strides[2], t, d, D_K), _load(log_v, v_strides[2], t, e, D_V)
                q_t, g_t = _load(q, q_strides[2], t, d, D_K), _load(g_y, y_strides[2], t, e, D_V, 0.0)
                s_after, z_after = _logaddexp(s, k_t[:, None] + v_t[None, :]), _logaddexp(z, k_t)
                read, read_z = _gradient_of_reading(q_t, g_t, s_after, z_after)
                _store(g_q, H * D_K, t, d, D_K, tl.sum(read, 1) + read_z)
                g_s, g_z = g_s + read, g_z + read_z
                written, written_z = g_s * _token_share(k_t, v_t, s_after), g_z * _share(k_t, z_after)
                _store(g_k, H * D_K, t, d, D_K, tl.sum(written, 1) + written_z)
                _store(g_v, H * D_V, t, e, D_V, tl.sum(written, 0))
                g_s, g_z = g_s * _share(s, s_after), g_z * _share(z, z_after)
    else:
        s, z = _after_tokens(first_s, first_z, k, log_v, k_strides[2], v_strides[2], 0, S, d, e, D_K, D_V)
        for t in range(T):
            q_t, g_t = _load(q, q_strides[2], t, d, D_K), _load(g_y, y_strides[2], t, e, D_V, 0.0)
            read, read_z = _gradient_of_reading(q_t, g_t, s, z)
            _store(g_q, H * D_K, t, d, D_K, tl.sum(read, 1) + read_z)
            g_s, g_z = g_s + read, g_z + read_z
        for t in range(S):
            k_t, v_t = _load(k, k_strides[2], t, d, D_K), _load(log_v, v_strides[2], t, e, D_V)
            written, written_z = g_s * _token_share(k_t, v_t, s), g_z * _share(k_t, z)
            _store(g_k, H * D_K, t, d, D_K, tl.sum(written, 1) + written_z)
            _store(g_v, H * D_V, t, e, D_V, tl.sum(written, 0))
        g_s, g_z = g_s * _share(first_s, s), g_z * _share(first_z, z)

    if HAS_STATE:
        _store_state(g_log_s + g * D_K * D_V, g_log_z + (part + g) * D_K, 0, g_s, g_z, 0, d, e, D_K, D_V)


@triton.jit
def _load(head, stride, t, column, D: tl.constexpr, fill=NOTHING):
    """Load columns of token t of a head; `fill` beyond its D columns."""
    token = head + t * tl.cast(stride, tl.int64)
    return tl.load(token + column, mask=column < D, other=fill).to(tl.float64)


@triton.jit
def _store(head, stride, t, column, D: tl.constexpr, x):
    """Undo `_load`."""
    if head.dtype.element_ty != tl.float64:
        x = x.to(tl.float32)  # only float32 converts to bfloat16
    token = head + t * tl.cast(stride, tl.int64)
    tl.store(token + column, x.to(head.dtype.element_ty), mask=column < D)


@triton.jit
def _load_state(s_at, z_at, n, d, e, D_K: tl.constexpr, D_V: tl.constexpr, fill):
    """Load slot n of the states of a head: (BK, BV) and (BK,)."""
    here = (d < D_K)[:, None] & (e < D_V)[None, :]
    at = s_at + n * tl.cast(D_K * D_V, tl.int64) + d[:, None] * D_V + e[None, :]
    z = tl.load(z_at + n * D_K + d, mask=d < D_K, other=fill)
    return tl.load(at, mask=here, other=fill).to(tl.float64), z.to(tl.float64)


@triton.jit
def _store_state(s_at, z_at, n, s, z, block, d, e, D_K: tl.constexpr, D_V: tl.constexpr):
    here = (d < D_K)[:, None] & (e < D_V)[None, :]
    at = s_at + n * tl.cast(D_K * D_V, tl.int64) + d[:, None] * D_V + e[None, :]
    tl.store(at, s.to(s_at.dtype.element_ty), mask=here)
    tl.store(z_at + n * D_K + d, z.to(z_at.dtype.element_ty), mask=(d < D_K) & (block == 0))


@triton.jit
def _first_state(
    log_s,
    log_z,
    g,
    d,
    e,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_STATE: tl.constexpr,
):
    """The state before the first token."""
    if HAS_STATE:
        s, z = _load_state(log_s + g * D_K * D_V, log_z + g * D_K, 0, d, e, D_K, D_V, NOTHING)
    else:
        s, z = tl.full((BK, BV), NOTHING, tl.float64), tl.full((BK,), NOTHING, tl.float64)
    return s, z


@triton.jit
def _after_tokens(s, z, k, log_v, k_stride, v_stride, start, stop, d, e, D_K: tl.constexpr, D_V: tl.constexpr):
    """Return the state after tokens `start` to `stop` of a head, given the state before them."""
    for t in range(start, stop):
        k_t, v_t = _load(k, k_stride, t, d, D_K), _load(log_v, v_stride, t, e, D_V)
        s, z = _logaddexp(s, k_t[:, None] + v_t[None, :]), _logaddexp(z, k_t)
    return s, z


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
def _log_y(q, s, z):
    return _logsumexp(q[:, None] + s) - _logsumexp(q + z)


@triton.jit
def _share(part, whole):
    """exp(part - whole) for a term of a log-sum, between 0 and 1; 0 for an empty sum."""
    return tl.exp(part - finite(whole))


@triton.jit
def _token_share(k, v, s):
    return _share(k[:, None] + v[None, :], s)


@triton.jit
def _gradient_of_reading(q, g_y, s, z):
    """Return gradients of s and z from that of log_y; their sums over values are the gradient of q."""
    log_S, log_Z = _logsumexp(q[:, None] + s), _logsumexp(q + z)
    return g_y[None, :] * _share(q[:, None] + s, log_S[None, :]), -tl.sum(g_y, 0) * _share(q + z, log_Z)
