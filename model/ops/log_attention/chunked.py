"""Log-space attention in chunks: matrix products instead of latent states, memory linear in length, exact at any range.

Every sum of the definition is over positive terms. So inside a chunk of C tokens it is a product of matrices of
exponentials, and between chunks only the sum so far is carried. The normalizer is one more value column, identically 0.
Each exponential is measured against a power of two, its frame, which makes all of them at most 1:

    2^key[d]      above exp(k[j, d]), for all tokens j up to the chunk's last      e_k = exp(k) 2^-key          (C, d_k)
    2^value[e]    above exp(log_v[j, e]), for the same tokens                      e_v = exp(log_v) 2^-value    (C, E)
    2^row[t]      above exp(q[t, d]) 2^key[d], for all d                           e_q = exp(q) 2^(key - row)   (C, d_k)
    M[d, e]       exp(log_s[d, e]) 2^-(key + value), log_s being the state before the chunk

    sums = e_q M + tril(e_q e_k^T) e_v             log_y = log(sums / its last column) + value ln 2

Moving the key's frame from k to q before q's row is measured is what makes the largest term of a row the one at its
maximum. After the chunk, M + e_k^T e_v is brought into the frame of the next by factors that are at most 1. The frames
cancel from log_y, so the backward pass takes them as constants: it is the transpose of these products, in which the
gradient of M is carried from the last chunk to the first.

What can go wrong is that terms underflow which together matter. As all terms are positive, the result proves itself: a
sum of at least CERTAIN (frames.py) cannot have lost what matters. Chunks with a smaller one are computed again in
log space (`repair.py`, `exact.py`), and so are their gradients. A sum of nothing but values of zero is 0, and certain.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.ops.log_attention import repair
from model.ops.log_attention.chunks import CHUNK, join, split
from model.ops.log_attention.frames import CERTAIN, LN2, log_of_scaled, scaled, split_exp, whole_log2
from model.ops.log_attention.state import LogAttentionState, accumulation_dtype, empty_state


def chunked_log_attention(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    *,
    causal: bool = True,
    state: LogAttentionState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LogAttentionState]:
    """As `log_attention`. Both passes hold O(T (d_k + d_v)) numbers, and T / CHUNK states of d_k x (d_v + 1)."""
    (B, H, T, d_k), (S, d_v) = q.shape, log_v.shape[-2:]
    dtype, acc = log_v.dtype, accumulation_dtype(q)
    state = empty_state(q, log_v) if state is None else state
    log_s = torch.cat([state.log_s, state.log_z.unsqueeze(-1)], dim=-1)  # (B, H, d_k, E), E = d_v + 1
    log_y, log_s, *_ = _attend(
        q.to(acc).reshape(B * H, T, d_k),
        k.to(acc).reshape(B * H, S, d_k),
        pad(log_v.to(acc).reshape(B * H, S, d_v), (0, 1)),  # the normalizer's column
        log_s.to(acc).reshape(B * H, d_k, d_v + 1),
        causal,
        return_state,
    )
    log_y = log_y.view(B, H, T, d_v).to(dtype)
    if not return_state:
        return log_y
    log_s = log_s.view(B, H, d_k, d_v + 1)
    return log_y, LogAttentionState(log_s[..., :-1], log_s[..., -1])


@torch.library.custom_op("log_gpt::log_attention", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, log_v: Tensor, log_s: Tensor, causal: bool, want_state: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q (G, T, d_k), k (G, S, d_k), log_v (G, S, E), log_s (G, d_k, E) -> log_y (G, T, E - 1), log_s (G, d_k, E).

    Then, for the backward pass: M before each chunk and after the last (G, N + 1, d_k, E), the sums (G, N, C, E), and
    which chunks were doubtful (G, N).
    """
    with torch.autocast(q.device.type, enabled=False):
        frames = _frames(k, log_v, log_s, causal)
        e_q, e_k, e_v = _exponentials(q, k, log_v, frames, causal)
        M = _carry(e_k.mT @ e_v, log_s, frames)
        sums = e_q @ (M[:, :-1] if causal else M[:, 1:])  # (G, N, C, E)
        if causal:  # else there is one chunk, and its queries see all of it: the state after it
            sums.add_((e_q @ e_k.mT).tril_() @ e_v)
        log_y = join(log_of_scaled(sums[..., :-1] / sums[..., -1:], frames.value[..., :-1]), q.shape[1]).contiguous()
        after = log_of_scaled(M[:, -1], frames.key[:, -1].mT + frames.value[:, -1])
        call = repair.Call(q, k, log_v, log_s, causal)
        doubtful, lost = _doubtful(call, sums), _lost(call, M[:, -1], want_state)
        if doubtful.any() or lost.any():
            repair.forward(call, doubtful, lost, log_y, after)
    return log_y, after, M, sums, doubtful


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, log_v: Tensor, log_s: Tensor, causal: bool, want_state: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (G, T, d_k), E = q.shape, log_v.shape[-1]
    C = min(CHUNK, T) if causal else T
    N = -(-T // C)
    return (
        q.new_empty(G, T, E - 1),
        torch.empty_like(log_s),
        q.new_empty(G, N + 1, d_k, E),
        q.new_empty(G, N, C, E),
        q.new_empty(G, N, dtype=torch.bool),
    )


@torch.library.custom_op("log_gpt::log_attention_backward", mutates_args=())
def _attend_backward(
    g_y: Tensor,
    g_log_s: Tensor,
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_s: Tensor,
    M: Tensor,
    sums: Tensor,
    doubtful: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, log_v and log_s, from those of log_y (G, T, E - 1) and of the state after (G, d_k, E)."""
    with torch.autocast(q.device.type, enabled=False):
        if sums.amin() < CERTAIN[sums.dtype]:  # of doubtful chunks, or of nothing but values of zero
            sums = sums.masked_fill(doubtful[:, :, None, None] | (sums == 0), 1)
        frames = _frames(k, log_v, log_s, causal)
        e_q, e_k, e_v = _exponentials(q, k, log_v, frames, causal)
        g_log_S = torch.cat([g_y, -g_y.sum(-1, keepdim=True)], dim=-1)  # (G, T, E)
        g_sums = split(g_log_S, sums.shape[2], 0.0) / sums  # (G, N, C, E)
        g_seen = e_q.mT @ g_sums  # (G, N, d_k, E): of the M that the chunk's queries saw
        before = M[:, :-1]
        if causal:
            g_A = (g_sums @ e_v.mT).tril_()  # (G, N, C, C)
            g_q = (g_sums @ before.mT).add_(g_A @ e_k).mul_(e_q)
            g_k = (g_A.mT @ e_q).mul_(e_k)  # through the chunk's own queries
            g_v = ((e_q @ e_k.mT).tril_().mT @ g_sums).mul_(e_v)
        else:
            g_q = (g_sums @ M[:, 1:].mT).mul_(e_q)
            g_k, g_v = torch.zeros_like(e_k), torch.zeros_like(e_v)

        call = repair.Call(q, k, log_v, log_s, causal)
        lost = _lost(call, M[:, -1].masked_fill(g_log_s == 0, 1))
        g_after = torch.where((g_log_s == 0) | (M[:, -1] == 0), 0, g_log_s / M[:, -1])
        g_first, g_M = _carry_back(g_seen, g_after, frames, causal)
        later_k = (e_v @ g_M.mT).mul_(e_k)  # through the queries of later chunks
        later_v = (e_k @ g_M).mul_(e_v)
        chunks = ((g_q, q), (later_k.add_(g_k), k), (later_v.add_(g_v), log_v))
        gradients = [*(join(g, x.shape[1]).contiguous() for g, x in chunks), g_first * before[:, 0]]
        if doubtful.any() or lost.any():
            dense = repair.Dense(g_q, g_k, g_v, g_seen, e_k, e_v, before)
            repair.backward(call, doubtful, lost, g_log_S, g_log_s, dense, gradients)
    d_q, d_k, d_v, d_log_s = gradients
    return d_q, d_k, d_v, d_log_s


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.causal, _ = inputs
    _, _, M, sums, doubtful = output
    ctx.save_for_backward(*tensors, M, sums, doubtful)
    ctx.mark_non_differentiable(doubtful)


def _backward(ctx: Any, g_y: Tensor, g_log_s: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *_attend_backward(g_y, g_log_s, *ctx.saved_tensors, ctx.causal), None, None


_attend.register_autograd(_backward, setup_context=_save_for_backward)


@_attend_backward.register_fake
def _(g_y: Tensor, g_log_s: Tensor, q: Tensor, k: Tensor, log_v: Tensor, log_s: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (q, k, log_v, log_s))


class _Frames(NamedTuple):
    """Powers of two that the exponentials of each of N chunks are measured against: whole numbers, 0 where unknown."""

    key: Tensor
    """(G, N, 1, d_k); -inf where all keys so far are."""
    value: Tensor
    """(G, N, 1, E)."""
    factor: Tensor
    """(G, N, d_k, E): from the frame of the chunk before (of the state, for the first) into this one's."""


def _frames(k: Tensor, log_v: Tensor, log_s: Tensor, causal: bool) -> _Frames:
    """Frames for keys (G, S, d_k), values (G, S, E) and the state before them (G, d_k, E)."""
    C = min(CHUNK, k.shape[1]) if causal else k.shape[1]
    log_z = log_s[:, None, :, -1]  # (G, 1, d_k)
    mean = (log_s - _finite(log_s[..., -1:])).amax(1, keepdim=True)  # (G, 1, E): of log_v, over the state's tokens
    keys = torch.cat([log_z, split(k, C, -torch.inf).amax(2)], dim=1)
    values = torch.cat([mean, split(log_v, C, -torch.inf).amax(2)], dim=1)
    keys, values = (whole_log2(x).cummax(1).values for x in (keys, values))  # (G, 1 + N, .)
    decay = torch.exp2(keys[:, :-1] - _finite(keys[:, 1:]))  # at most 1
    rescale = torch.exp2(values[:, :-1] - _finite(values[:, 1:]))  # at most 1
    return _Frames(
        keys[:, 1:].unsqueeze(2), _finite(values[:, 1:]).unsqueeze(2), decay.unsqueeze(-1) * rescale.unsqueeze(-2)
    )


def _exponentials(q: Tensor, k: Tensor, log_v: Tensor, frames: _Frames, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """e_q (G, N, C, d_k), e_k (G, N, C, d_k), e_v (G, N, C, E), all between 0 and about 1."""
    C_q, C_k = (min(CHUNK, q.shape[1]), min(CHUNK, k.shape[1])) if causal else (q.shape[1], k.shape[1])
    row = (split(q, C_q, 0.0) / LN2).add_(frames.key).amax(-1, keepdim=True).ceil_()  # (G, N, C, 1)
    return (
        _measured(q, C_q, _finite(row) - frames.key, fill=1.0),  # a missing query's sums are not 0, which is doubtful
        _measured(k, C_k, _finite(frames.key), fill=0.0),
        _measured(log_v, C_k, frames.value, fill=0.0),
    )


def _measured(x: Tensor, C: int, frame: Tensor, fill: float) -> Tensor:
    """exp(x) 2^-frame in chunks, with `fill` for the exponential of a missing token: (G, T, D) -> (G, N, C, D)."""
    mantissa, exponent = split_exp(x)
    return scaled(split(mantissa, C, fill), None if exponent is None else split(exponent, C, 0.0), frame)


def _carry(updates: Tensor, log_s: Tensor, frames: _Frames) -> Tensor:
    """M before each chunk and after the last, (G, N + 1, d_k, E), from the e_k^T e_v of each chunk."""
    G, N, d_k, E = updates.shape
    M = updates.new_empty(G, N + 1, d_k, E)
    M[:, 0] = scaled(*split_exp(log_s), _finite(frames.key[:, 0]).mT + frames.value[:, 0])
    for n in range(1, N):
        torch.mul(M[:, n - 1] + updates[:, n - 1], frames.factor[:, n], out=M[:, n])
    torch.add(M[:, N - 1], updates[:, N - 1], out=M[:, N])
    return M


def _carry_back(g_seen: Tensor, g_after: Tensor, frames: _Frames, causal: bool) -> tuple[Tensor, Tensor]:
    """Gradient of M before the first chunk (G, d_k, E), and after each chunk (G, N, d_k, E), in the chunk's frame."""
    if not causal:
        g = g_seen[:, 0] + g_after
        return g, g.unsqueeze(1)
    g_M = torch.empty_like(g_seen)
    g_M[:, -1] = g_after
    for n in reversed(range(1, g_seen.shape[1])):
        torch.mul(g_M[:, n] + g_seen[:, n], frames.factor[:, n], out=g_M[:, n - 1])
    return g_M[:, 0] + g_seen[:, 0], g_M


def _doubtful(call: repair.Call, sums: Tensor) -> Tensor:
    """Chunks (G, N) with a sum (G, N, C, E) that is too small to be certain."""
    small = sums < CERTAIN[sums.dtype]
    if small.any() and (call.log_v == -torch.inf).any():  # a sum of nothing is 0, and certain
        some = _something_to_sum(call)
        small &= split(some.float(), sums.shape[2], 1.0).bool() if call.causal else some[:, None, -1:]
    return small.flatten(2).any(-1)


def _lost(call: repair.Call, after: Tensor, wanted: bool = True) -> Tensor:
    """Heads (G) whose last M (G, d_k, E), which is wanted, has an entry too small to be certain."""
    small = after < CERTAIN[after.dtype]
    if not wanted or not small.any():
        return small.new_zeros(len(small))
    return (small & _something_to_sum(call)[:, -1:]).flatten(1).any(-1)


def _something_to_sum(call: repair.Call) -> Tensor:
    """Whether any value up to a token, of a key that is not masked, is not zero: (G, S, E)."""
    some = (call.log_v > -torch.inf) & (call.k > -torch.inf).any(-1, keepdim=True)
    return (some.int().cumsum(1) > 0) | (call.log_s > -torch.inf).any(1, keepdim=True)


def _finite(x: Tensor) -> Tensor:
    """`x` with 0 for -inf, so that a difference from it is never -inf - -inf."""
    return torch.where(x == -torch.inf, 0, x)
