"""GPU kernels of log attention. All but the short `scan` compute all chunks in parallel.

    states        what each chunk adds to the state
    scan          the state before each chunk
    outputs       y
    query_grads   gradients of queries, and of the state before each chunk by that chunk's queries
    scan          gradient of the state after each chunk, from the last chunk to the first
    key_grads     gradients of keys, values and gates

chunked_attention.py has the formulas. The last column of the state belongs to norms. Here it is a
vector z beside M: as a column it would double products, because their dimensions are powers of two.

- Gates scale an operand of a product, not the product: without them it may overflow.
- Each operand is rounded once and used everywhere, so that errors cancel where gradients do.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice

from model.ops.log_attention import naive_attention
from model.ops.log_attention.chunked_attention import EMPTY as EMPTY_NORM

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
MASKED = tl.constexpr(-math.inf)
LOG2E = tl.constexpr(1 / math.log(2))
QUERY_LOW = tl.constexpr(naive_attention.QUERY[0])
KEY_LOW = tl.constexpr(naive_attention.KEY[0])
KEY_HIGH = tl.constexpr(naive_attention.KEY[1])
VALUE_LOW = tl.constexpr(naive_attention.VALUE[0])
VALUE_HIGH = tl.constexpr(naive_attention.VALUE[1])
EMPTY = tl.constexpr(EMPTY_NORM)
RESET = tl.constexpr(-128.0)  # exp(RESET) is 0 in float32
# Sums of 64 gates are exact: the high parts are multiples of 2^-10 up to 128 / ln(2), the low parts
# multiples of 2^-28 up to 2^-10.
HIGH = tl.constexpr(2.0**10)
LOW = tl.constexpr(2.0**28)


class Constants(NamedTuple):
    """What a kernel is compiled for."""

    EXP: bool
    """As in Form."""
    LOG: bool
    """As in Form."""
    GATED: bool
    D_K: int
    D_V: int
    BK: int
    """Features of a program: a power of two."""
    BV: int
    """Value columns that are multiplied at a time: a power of two."""
    C: int
    """Tokens of a chunk."""
    OPERAND: Any
    """Type of operands of products."""
    PRECISION: str
    """How float32 operands are multiplied."""


class Tokens(NamedTuple):
    """A tensor (B, H, T, D) whose last dimension is dense."""

    pointer: Any
    strides: Any
    """Of B, H and T."""


class States(NamedTuple):
    """A state, or the gradient of one, for each chunk of each head."""

    M: Any
    """(B H, N, d_k, d_v)."""
    z: Any
    """(B H, N, d_k): the column of the norm."""


class SumGrads(NamedTuple):
    """What query_grads hands to key_grads."""

    sums: Any
    """(B H, N, C, d_v): gradients of weighted sums of values."""
    norms: Any
    """(B H, N, C): gradients of norms."""
    queries: Any
    """(B H, N, C): <g_e, e_q>. In theory 0, since y does not depend on e_q's scale; its errors
    cancel those of key_grads."""


class Chunk(NamedTuple):
    """A chunk of a head."""

    index: Any
    """Among all chunks of all heads."""
    b: Any
    h: Any
    start: Any
    """Its first token."""
    T: Any


class Gates(NamedTuple):
    """What gates keep: _Gates in chunked_attention.py, with a_t = high + low in powers of two."""

    high: Any
    low: Any
    start: Any
    start_power: Any
    """start rounded up to a power of two: scaling by it is exact."""
    start_rest: Any
    """start / start_power."""
    end: Any
    decay: Any


@triton.jit
def zeros(rows: tl.constexpr, columns: tl.constexpr):
    return tl.zeros((rows, columns), tl.float32)


@triton.jit
def this_chunk(H, T, P: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    N = tl.cdiv(T, P.C)
    head = index // N
    return Chunk(index, head // H, head % H, index % N * P.C, T)


@triton.jit
def value_columns(block, P: tl.constexpr):
    return block * P.BV + tl.arange(0, P.BV)


@triton.jit
def token_pointers(x, chunk, P: tl.constexpr):
    """Pointers to a chunk's tokens (C,), and which of them exist."""
    t = chunk.start + tl.arange(0, P.C)
    head = x.pointer + chunk.b * x.strides[0] + chunk.h * x.strides[1]
    return head + t * x.strides[2], t < chunk.T


@triton.jit
def load_tokens(x, chunk, columns, fill, D: tl.constexpr, P: tl.constexpr):
    """Load columns of a chunk's tokens in float32: (C, columns)."""
    tokens, exist = token_pointers(x, chunk, P)
    mask = exist[:, None] & (columns < D)[None, :]
    return tl.load(tokens[:, None] + columns[None, :], mask=mask, other=fill).to(tl.float32)


@triton.jit
def store_tokens(x, value, chunk, columns, D: tl.constexpr, P: tl.constexpr):
    tokens, exist = token_pointers(x, chunk, P)
    mask = exist[:, None] & (columns < D)[None, :]
    tl.store(tokens[:, None] + columns[None, :], value.to(x.pointer.dtype.element_ty), mask=mask)


@triton.jit
def matrix_pointers(states, chunk, e, P: tl.constexpr):
    """Pointers to columns of a chunk's M (BK, BV), and which elements exist."""
    d = tl.arange(0, P.BK)
    M = states.M + chunk.index * (P.D_K * P.D_V)
    exist = (d < P.D_K)[:, None] & (e < P.D_V)[None, :]
    return M + d[:, None] * P.D_V + e[None, :], exist


@triton.jit
def load_matrix(states, chunk, e, P: tl.constexpr):
    pointers, exist = matrix_pointers(states, chunk, e, P)
    return tl.load(pointers, mask=exist, other=0.0)


@triton.jit
def store_matrix(states, value, chunk, e, P: tl.constexpr):
    pointers, exist = matrix_pointers(states, chunk, e, P)
    tl.store(pointers, value.to(P.OPERAND), mask=exist)


@triton.jit
def load_z(states, chunk, P: tl.constexpr):
    d = tl.arange(0, P.BK)
    return tl.load(states.z + chunk.index * P.D_K + d, mask=d < P.D_K, other=0.0)


@triton.jit
def store_z(states, value, chunk, P: tl.constexpr):
    d = tl.arange(0, P.BK)
    tl.store(states.z + chunk.index * P.D_K + d, value, mask=d < P.D_K)


@triton.jit
def row_pointers(x, chunk, P: tl.constexpr):
    """Pointers (C,) to numbers of a chunk's tokens in x (B H, N, C)."""
    return x + chunk.index * P.C + tl.arange(0, P.C)


@triton.jit
def sum_pointers(g_sums, chunk, e, P: tl.constexpr):
    """Pointers to columns of a chunk's g_sums (C, BV), and which elements exist."""
    rows = chunk.index * P.C + tl.arange(0, P.C)
    return g_sums + rows[:, None] * P.D_V + e[None, :], (e < P.D_V)[None, :]


@triton.jit
def exp_bounded(x, low, high):
    """exp of x within bounds. NaN stays."""
    return tl.exp2(tl.clamp(x, low, high, propagate_nan=tl.PropagateNan.ALL) * LOG2E)


@triton.jit
def key_exp(x, high):
    """exp of logarithms of features up to `high`. -inf, which masks, stays."""
    return tl.where(x == MASKED, 0.0, exp_bounded(x, KEY_LOW, high))


@triton.jit
def elu_plus_1(x):
    return tl.maximum(x, 0.0) + key_exp(x, 0.0)


@triton.jit
def load_queries(q, chunk, P: tl.constexpr):
    """e_q (C, BK). Features that do not exist have any finite value, since those of keys are 0."""
    d = tl.arange(0, P.BK)
    x = load_tokens(q, chunk, d, 0.0, P.D_K, P)
    if P.EXP:
        largest = tl.max(x if P.D_K == P.BK else tl.where((d < P.D_K)[None, :], x, MASKED), 1)
        return exp_bounded(x - largest[:, None], QUERY_LOW, 0.0)
    else:
        return elu_plus_1(x)


@triton.jit
def load_keys(k, chunk, P: tl.constexpr):
    """e_k (C, BK): 0 for keys and features that do not exist."""
    x = load_tokens(k, chunk, tl.arange(0, P.BK), MASKED, P.D_K, P)
    return key_exp(x, KEY_HIGH) if P.EXP else elu_plus_1(x)


@triton.jit
def load_values(v, chunk, e, P: tl.constexpr):
    """Columns of e_v (C, BV)."""
    x = load_tokens(v, chunk, e, 0.0, P.D_V, P)
    return exp_bounded(x, VALUE_LOW, VALUE_HIGH) if P.LOG else x


@triton.jit
def derivative(e, P: tl.constexpr):
    """Derivative of features, from their values."""
    return e if P.EXP else tl.minimum(e, 1.0)


@triton.jit
def load_gates(f, chunk, P: tl.constexpr):
    if P.GATED:
        tokens, exist = token_pointers(f, chunk, P)
        a = tl.load(tokens, mask=exist, other=0.0).to(tl.float32)
        a = tl.maximum(a, RESET, propagate_nan=tl.PropagateNan.ALL) * LOG2E
        high = tl.floor(a * HIGH) / HIGH
        low = tl.floor((a - high) * LOW) / LOW
        all_high = tl.sum(high, 0)
        all_low = tl.sum(low, 0)
        high = tl.cumsum(high, 0)
        low = tl.cumsum(low, 0)
        a = high + low
        power = tl.exp2(tl.ceil(a))
        rest = tl.exp2(a - tl.ceil(a))
        end = tl.exp2((all_high - high) + (all_low - low))
        return Gates(high, low, power * rest, power, rest, end, tl.exp2(all_high + all_low))
    else:
        return Gates(0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0)


@triton.jit
def scale_rows(x, factors, P: tl.constexpr):
    """Rows of x times a chunk's start or end."""
    return x * factors[:, None] if P.GATED else x


@triton.jit
def apply_gates(scores, gates, P: tl.constexpr):
    """Multiply scores (query, key) by what gates keep of a key; 0 for later keys."""
    t = tl.arange(0, P.C)
    if P.GATED:
        high = gates.high[:, None] - gates.high[None, :]
        scores *= tl.exp2(high + (gates.low[:, None] - gates.low[None, :]))
    return tl.where(t[:, None] >= t[None, :], scores, 0.0)


@triton.jit
def apply_gates_by_key(scores, gates, P: tl.constexpr):
    """`apply_gates` of scores (key, query)."""
    t = tl.arange(0, P.C)
    if P.GATED:
        high = gates.high[None, :] - gates.high[:, None]
        scores *= tl.exp2(high + (gates.low[None, :] - gates.low[:, None]))
    return tl.where(t[:, None] <= t[None, :], scores, 0.0)


@triton.jit
def round_operand(x, P: tl.constexpr):
    """Round x for products. The compiler may not compute x again for another layout: it would
    repeat exponentials."""
    x = x.to(P.OPERAND)
    if INTERPRETED:
        return x
    else:
        pack: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=pack
        )


@triton.jit
def scale_operand(x, factors, P: tl.constexpr):
    """Scale rows of an operand."""
    return round_operand(x.to(tl.float32) * factors[:, None], P) if P.GATED else x


@triton.jit
def multiply(a, b, P: tl.constexpr):
    if INTERPRETED:  # its dot takes bfloat16 for integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=P.PRECISION, out_dtype=tl.float32)


@triton.jit
def divide(a, b):
    """a / b in two instructions."""
    return a / b if INTERPRETED else libdevice.fast_dividef(a, b)


@triton.jit
def take_log(x):
    return tl.log(x) if INTERPRETED else libdevice.fast_logf(x)


@triton.jit
def sum_vector(x):
    """Sum of a vector. Triton 3.6 and 3.7 cannot compile tl.sum(x, 0) for Blackwell if x depends on
    a product."""
    return tl.sum(tl.sum(x[None, :], 1), 0)


@triton.jit
def sum_weights(e_q, A, z, gates, P: tl.constexpr):
    """Sums of weights (C,)."""
    from_state = tl.sum(e_q.to(tl.float32) * z[None, :], 1)
    from_state = from_state * gates.start if P.GATED else from_state
    return from_state + tl.sum(A.to(tl.float32), 1)


@triton.jit
def sum_values(e_q, A, M, e_v, gates, P: tl.constexpr):
    """Weighted sums of values (C, BV)."""
    return scale_rows(multiply(e_q, M, P), gates.start, P) + multiply(A, e_v, P)


@triton.jit(do_not_specialize=["T"])
def states(x, added, decays, H, T, P: tl.constexpr):
    """Compute what each chunk adds to the state, and what gates keep of the state before it, for a
    block of value columns."""
    chunk = this_chunk(H, T, P)
    e = value_columns(tl.program_id(1), P)
    gates = load_gates(x.log_f, chunk, P)
    k_end = round_operand(scale_rows(load_keys(x.k, chunk, P), gates.end, P), P)
    e_v = round_operand(load_values(x.v, chunk, e, P), P)
    store_matrix(added, multiply(tl.trans(k_end), e_v, P), chunk, e, P)
    store_z(added, tl.sum(k_end.to(tl.float32), 0), chunk, P)
    tl.store(decays + chunk.index, gates.decay)


@triton.jit(do_not_specialize=["N"])
def scan(x, decays, first, last, N, REVERSE: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr):
    """Replace what each chunk adds to the state, x, by the state before it, starting from `first`.
    `last` becomes the state after all chunks. REVERSE: from the last chunk to the first.

    first, last: (B H, d_k, d_v + 1). The last program of a head computes the column of the norm.
    """
    block = tl.program_id(1)
    if block < tl.num_programs(1) - 1:
        i = block * BLOCK + tl.arange(0, BLOCK)
        scan_columns(x.M, i, P.D_V, 0, decays, first, last, N, REVERSE, P)
    else:
        d = tl.arange(0, P.BK)
        scan_columns(x.z, d, 1, P.D_V, decays, first, last, N, REVERSE, P)


@triton.jit
def scan_columns(
    x,
    i,
    WIDTH: tl.constexpr,
    COLUMN: tl.constexpr,
    decays,
    first,
    last,
    N,
    REVERSE: tl.constexpr,
    P: tl.constexpr,
):
    """`scan` of elements i of x (B H, N, d_k, WIDTH): columns of a state from COLUMN on."""
    # Where these elements are in states, and in the first chunk to be read.
    head = tl.program_id(0).to(tl.int64)
    in_state = (head * P.D_K + i // WIDTH) * (P.D_V + 1) + COLUMN + i % WIDTH
    SIZE: tl.constexpr = P.D_K * WIDTH
    exist = i < SIZE
    n = head * N + (N - 1 if REVERSE else 0)
    step: tl.constexpr = -1 if REVERSE else 1
    decays += n
    x += n * SIZE + i
    total = tl.load(first + in_state, mask=exist, other=0.0)
    following = tl.load(x, mask=exist, other=0.0)
    for remaining in range(N, 0, -1):
        added = following.to(tl.float32)
        # Load a chunk ahead, as Triton would by itself if it could for Blackwell.
        following = tl.load(x + step * SIZE, mask=exist & (remaining > 1), other=0.0)
        tl.store(x, total.to(x.dtype.element_ty), mask=exist)
        if P.GATED:
            total *= tl.load(decays)
        total += added
        decays += step
        x += step * SIZE
    tl.store(last + in_state, total, mask=exist)


@triton.jit(do_not_specialize=["T"])
def outputs(x, before, y, H, T, P: tl.constexpr):
    """Compute y for a block of value columns."""
    chunk = this_chunk(H, T, P)
    e = value_columns(tl.program_id(1), P)
    e_q = round_operand(load_queries(x.q, chunk, P), P)
    e_k = round_operand(load_keys(x.k, chunk, P), P)
    e_v = round_operand(load_values(x.v, chunk, e, P), P)
    gates = load_gates(x.log_f, chunk, P)
    A = apply_gates(multiply(e_q, tl.trans(e_k), P), gates, P).to(P.OPERAND)
    sums = sum_values(e_q, A, load_matrix(before, chunk, e, P), e_v, gates, P)
    result = sums * (1.0 / sum_weights(e_q, A, load_z(before, chunk, P), gates, P))[:, None]
    store_tokens(y, take_log(result) if P.LOG else result, chunk, e, P.D_V, P)


@triton.jit(do_not_specialize=["T"])
def query_grads(x, g_y, before, g_q, g_of, D, H, T, BLOCKS: tl.constexpr, P: tl.constexpr):
    """Compute gradients of queries, SumGrads `g_of`, and D: the gradient of the state before each
    chunk by that chunk's queries."""
    # Compute weights and norms again, as the forward pass does.
    chunk = this_chunk(H, T, P)
    e_q = round_operand(load_queries(x.q, chunk, P), P)
    e_k = round_operand(load_keys(x.k, chunk, P), P)
    gates = load_gates(x.log_f, chunk, P)
    A = apply_gates(multiply(e_q, tl.trans(e_k), P), gates, P).to(P.OPERAND)
    z = load_z(before, chunk, P)
    norm = sum_weights(e_q, A, z, gates, P)
    sees_keys = (norm < EMPTY) == 0  # true for NaN
    # Gradients are scaled by the power of two, and queries by the rest.
    rest_q = scale_operand(e_q, gates.start_rest, P)
    g_A = zeros(P.C, P.C)
    g_e = zeros(P.C, P.BK)
    g_norm = tl.zeros_like(norm)
    for block in range(BLOCKS):
        # Some value columns at a time: g, the gradient of their sums.
        e = value_columns(block, P)
        M = load_matrix(before, chunk, e, P)
        e_v = round_operand(load_values(x.v, chunk, e, P), P)
        sums = sum_values(e_q, A, M, e_v, gates, P)
        g = load_tokens(g_y, chunk, e, 0.0, P.D_V, P)
        g = divide(g, sums) if P.LOG else g * (1.0 / norm)[:, None]
        g = tl.where(sees_keys[:, None] & (e < P.D_V)[None, :], g, 0.0)
        g = round_operand(g, P)
        # What g gives to the norm, to the state before the chunk, to queries and to weights.
        to_start = scale_operand(g, gates.start_power, P)
        g_norm -= tl.sum(g.to(tl.float32) * sums, 1)
        pointers, exist = sum_pointers(g_of.sums, chunk, e, P)
        tl.store(pointers, g, mask=exist)
        store_matrix(D, multiply(tl.trans(rest_q), to_start, P), chunk, e, P)
        g_e += multiply(to_start, tl.trans(M), P)
        g_A += multiply(g, tl.trans(e_v), P)
    # The norm is one more column, with values of 1.
    g_norm = tl.where(sees_keys, divide(g_norm, norm), 0.0)
    tl.store(row_pointers(g_of.norms, chunk, P), g_norm)
    norm_to_start = g_norm * gates.start_power if P.GATED else g_norm
    store_z(D, tl.sum(rest_q.to(tl.float32) * norm_to_start[:, None], 0), chunk, P)
    g_e = scale_rows(g_e + norm_to_start[:, None] * z[None, :], gates.start_rest, P)
    # Again, since registers cannot hold the gates' factors until here.
    gates = load_gates(x.log_f, chunk, P)
    g_A = apply_gates(g_A + g_norm[:, None], gates, P)
    g_e += multiply(g_A.to(P.OPERAND), e_k, P)
    # From features to their logarithms.
    e_q = e_q.to(tl.float32)
    if P.GATED:
        tl.store(row_pointers(g_of.queries, chunk, P), tl.sum(g_e * e_q, 1))
    store_tokens(g_q, g_e * derivative(e_q, P), chunk, tl.arange(0, P.BK), P.D_K, P)


@triton.jit(do_not_specialize=["T"])
def key_grads(x, before, g_of, D, g_x, H, T, BLOCKS: tl.constexpr, P: tl.constexpr):
    """Compute gradients of keys, values and gates. D: the gradient of the state after each chunk.

    Scores are (key, query), so that no result of a product is transposed.
    """
    # Compute weights again, transposed.
    chunk = this_chunk(H, T, P)
    e_q = round_operand(load_queries(x.q, chunk, P), P)
    e_k = load_keys(x.k, chunk, P)
    gates = load_gates(x.log_f, chunk, P)
    k_end = round_operand(scale_rows(e_k, gates.end, P), P)
    e_k = round_operand(e_k, P) if P.GATED else k_end
    A = apply_gates_by_key(multiply(e_k, tl.trans(e_q), P), gates, P).to(P.OPERAND)
    # The norm's column of the state: its values are 1.
    z_D = load_z(D, chunk, P)
    # After the chunk, <M, D> = kept + added: what gates keep of the state before, and keys.
    kept = load_z(before, chunk, P) * gates.decay * z_D
    g_A = zeros(P.C, P.C)
    g_e = scale_rows(zeros(P.C, P.BK) + z_D[None, :], gates.end, P)
    for block in range(BLOCKS):
        # Some value columns at a time: keys give to their own chunk's sums, and to the state.
        e = value_columns(block, P)
        D_n = load_matrix(D, chunk, e, P)
        pointers, exist = sum_pointers(g_of.sums, chunk, e, P)
        g = tl.load(pointers, mask=exist, other=0.0)
        e_v = load_values(x.v, chunk, e, P)
        v_end = round_operand(scale_rows(e_v, gates.end, P), P)
        e_v = round_operand(e_v, P) if P.GATED else v_end
        g_A += multiply(e_v, tl.trans(g), P)
        g_e += multiply(v_end, tl.trans(D_n), P)
        g_v = multiply(A, g, P) + multiply(k_end, D_n, P)
        store_tokens(g_x.v, g_v * e_v.to(tl.float32) if P.LOG else g_v, chunk, e, P.D_V, P)
        if P.GATED:
            M = load_matrix(before, chunk, e, P).to(tl.float32) * gates.decay
            kept += tl.sum(M * D_n.to(tl.float32), 1)
    # Keys' share of the state, then of the scores: g_e goes from one to the other.
    e_k = e_k.to(tl.float32)
    added = tl.sum(g_e * e_k, 1)  # by each key to <M, D>
    gates = load_gates(x.log_f, chunk, P)  # again, as in query_grads
    g_A = apply_gates_by_key(g_A + tl.load(row_pointers(g_of.norms, chunk, P))[None, :], gates, P)
    g_e += multiply(g_A.to(P.OPERAND), e_q, P)
    # A gate's gradient: what queries read from it on, less what keys from it on give.
    if P.GATED:
        own = tl.load(row_pointers(g_of.queries, chunk, P)) - tl.sum(g_e * e_k, 1)
        store_gate_grads(x.log_f, g_x.log_f, own, sum_vector(kept) + sum_vector(added), chunk, P)
    store_tokens(g_x.k, g_e * derivative(e_k, P), chunk, tl.arange(0, P.BK), P.D_K, P)


@triton.jit
def store_gate_grads(f, g_f, own, after, chunk, P: tl.constexpr):
    """Store gradients of gates: a gate scales all that passes from before its token to later
    tokens, in the chunk (`own` (C,) from its token on) and in the state (`after`)."""
    t = tl.arange(0, P.C)
    # tl.cumsum: see sum_vector.
    g = tl.sum(tl.where(t[:, None] <= t[None, :], own[None, :], 0.0), 1) + after
    pointers, exist = token_pointers(f, chunk, P)
    g = tl.where(tl.load(pointers, mask=exist, other=0.0) <= RESET, 0.0, g)
    pointers, exist = token_pointers(g_f, chunk, P)
    tl.store(pointers, g.to(g_f.pointer.dtype.element_ty), mask=exist)
