"""Log-space attention in chunks: matrix products instead of latent states, memory linear in length.

Every sum of the definition is over positive terms. So inside a chunk of C tokens it is a product of matrices of
exponentials, and between chunks only the sum so far is carried. The normalizer is one more value column, identically 0.
Each exponential is taken in the frame of its chunk, which makes all of them at most 1:

    log_z[d]   log-sum of k[j, d] over all tokens j up to the chunk's last     e_k = exp(k - log_z)         (C, d_k)
    shift[e]   maximum of log_v[j, e] over the same tokens                     e_v = exp(log_v - shift)     (C, d_v)
    row[t]     maximum over d of q[t, d] + log_z[d]                            e_q = exp(q + log_z - row)   (C, d_k)
    M[d, e]    exp(log_s[d, e] - log_z[d] - shift[e]): a weighted mean of exp(log_v - shift) over the tokens before

    sums = e_q M + tril(e_q e_k^T) e_v             log_y = log(sums / its last column) + shift

After the chunk M + e_k^T e_v is carried into the frame of the next by two factors, both at most 1. The frames cancel
from log_y, so the backward pass takes them as constants: it is the transpose of these products, in which the gradient
of M is carried from the last chunk to the first.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from model.ops.log_attention.state import LogAttentionState, accumulation_dtype, empty_state

CHUNK = 64  # tokens: C x C scores and d_k x d_v states then cost about the same at head sizes from 32 to 128


def chunked_log_attention(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    *,
    causal: bool = True,
    state: LogAttentionState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LogAttentionState]:
    """As `log_attention`; forward and backward hold O(T (d_k + d_v)) numbers, none of size T x d_k x d_v."""
    (B, H, T, d_k), (S, d_v) = q.shape, log_v.shape[-2:]
    dtype, acc = log_v.dtype, accumulation_dtype(q)
    state = empty_state(q, log_v) if state is None else state
    sums = torch.cat([state.log_s, state.log_z.unsqueeze(-1)], dim=-1)  # (B, H, d_k, d_v + 1)
    with torch.autocast(q.device.type, enabled=False):
        log_y, sums = _ChunkedLogAttention.apply(
            q.to(acc).reshape(B * H, T, d_k),
            k.to(acc).reshape(B * H, S, d_k),
            pad(log_v.to(acc).reshape(B * H, S, d_v), (0, 1)),  # the normalizer's column
            sums.to(acc).reshape(B * H, d_k, d_v + 1),
            causal,
        )
    log_y = log_y.reshape(B, H, T, d_v).to(dtype)
    if not return_state:
        return log_y
    sums = sums.reshape(B, H, d_k, d_v + 1)
    return log_y, LogAttentionState(sums[..., :-1], sums[..., -1])


class _ChunkedLogAttention(torch.autograd.Function):
    """q (G, T, d_k), k (G, S, d_k), log_v (G, S, E), log_s (G, d_k, E) -> log_y (G, T, E - 1), log_s (G, d_k, E)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, log_v: Tensor, log_s: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        qs, ks, vs = _chunks(q, k, log_v, causal)
        frame = _frames(ks, vs, log_s)
        e_q, e_k, e_v = _exponentials(qs, ks, vs, frame)
        before, after = _carry(e_k.mT @ e_v, log_s, frame)  # (G, N, d_k, E), (G, d_k, E)
        sums = e_q @ (before if causal else after.unsqueeze(1))  # (G, N, C, E)
        if causal:  # else there is one chunk, and its queries see all of it: the state after it
            sums.add_((e_q @ e_k.mT).tril_() @ e_v)
        log_y = (sums[..., :-1] / sums[..., -1:]).log_().add_(frame.shift[..., :-1])
        ctx.save_for_backward(q, k, log_v, sums, before, after, *frame)
        ctx.causal = causal
        log_s = after.log().add_(frame.log_z[:, -1].mT).add_(frame.shift[:, -1])
        return _join(log_y, q), log_s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_y: Tensor, g_log_s: Tensor) -> tuple[Tensor | None, ...]:
        q, k, log_v, sums, before, after, *rest = ctx.saved_tensors
        frame, causal = _Frame(*rest), ctx.causal
        qs, ks, vs = _chunks(q, k, log_v, causal)
        e_q, e_k, e_v = _exponentials(qs, ks, vs, frame)

        g_y = _chunk(g_y, qs.shape[2], 0.0)
        g_sums = torch.cat([g_y, -g_y.sum(-1, keepdim=True)], dim=-1).div_(sums)  # (G, N, C, E)
        g_seen = e_q.mT @ g_sums  # (G, N, d_k, E): of the sums that the chunk's queries saw
        g_after = torch.where(after > 0, g_log_s / after, 0)  # (G, d_k, E): an empty sum has no gradient to give
        if causal:
            g_first, g_M = _carry_back(g_seen, g_after, frame)
            g_q, g_k, g_v = g_sums @ before.mT, e_v @ g_M.mT, e_k @ g_M
            g_A = (g_sums @ e_v.mT).tril_()  # (G, N, C, C)
            g_q += g_A @ e_k
            g_k += g_A.mT @ e_q
            g_v += (e_q @ e_k.mT).tril_().mT @ g_sums
        else:
            g_first = g_M = g_seen + g_after.unsqueeze(1)
            g_q, g_k, g_v = g_sums @ after.unsqueeze(1).mT, e_v @ g_M.mT, e_k @ g_M
            g_first = g_first[:, 0]
        return (
            _join(g_q.mul_(e_q), q),
            _join(g_k.mul_(e_k), k),
            _join(g_v.mul_(e_v), log_v),
            g_first * before[:, 0],
            None,
        )


class _Frame(NamedTuple):
    """What the exponentials of each of N chunks are measured against. An empty sum's frame is 0, to stay finite."""

    log_z: Tensor
    """(G, N, 1, d_k): log-sum of k up to and including the chunk; -inf where it is empty."""
    shift: Tensor
    """(G, N, 1, E): maximum of log_v up to and including the chunk."""
    factor: Tensor
    """(G, N, d_k, E): from the frame of the chunk before (of the initial state, for the first) into this one's."""


def _chunks(q: Tensor, k: Tensor, log_v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Split into (G, N, C, .); a last, ragged chunk is filled with keys of -inf, which count for nothing."""
    C_q = min(CHUNK, q.shape[1]) if causal else q.shape[1]
    C_k = C_q if causal else k.shape[1]
    return _chunk(q, C_q, 0.0), _chunk(k, C_k, -torch.inf), _chunk(log_v, C_k, -torch.inf)


def _chunk(x: Tensor, C: int, fill: float) -> Tensor:
    G, T, D = x.shape
    missing = -T % C
    return (pad(x, (0, 0, 0, missing), value=fill) if missing else x).reshape(G, -1, C, D)


def _join(chunks: Tensor, like: Tensor) -> Tensor:
    """Undo `_chunk`: (G, N, C, D) -> (G, T, D), T as in `like`."""
    return chunks.flatten(1, 2)[:, : like.shape[1]]


def _frames(k: Tensor, log_v: Tensor, log_s: Tensor) -> _Frame:
    """Frames for keys (G, N, C, d_k), values (G, N, C, E) and the state (G, d_k, E) before them."""
    log_z = torch.cat([log_s[:, None, :, -1], k.logsumexp(2)], dim=1).logcumsumexp(1)  # (G, 1 + N, d_k)
    mean = log_s - _finite(log_s[..., -1:])  # of log_v, over the tokens of the state
    shift = torch.cat([mean.amax(1, keepdim=True), log_v.amax(2)], dim=1).cummax(1).values  # (G, 1 + N, E)
    decay = (log_z[:, :-1] - _finite(log_z[:, 1:])).exp_()  # (G, N, d_k), at most 1
    rescale = (shift[:, :-1] - _finite(shift[:, 1:])).exp_()  # (G, N, E), at most 1
    return _Frame(
        log_z[:, 1:].unsqueeze(2),
        _finite(shift[:, 1:]).unsqueeze(2),
        decay.unsqueeze(-1) * rescale.unsqueeze(-2),
    )


def _exponentials(q: Tensor, k: Tensor, log_v: Tensor, frame: _Frame) -> tuple[Tensor, Tensor, Tensor]:
    """e_q (G, N, C, d_k), e_k (G, N, C, d_k), e_v (G, N, C, E), all between 0 and 1."""
    e_q = q + frame.log_z
    e_q = e_q.sub_(_finite(e_q.amax(-1, keepdim=True))).exp_()
    return e_q, (k - _finite(frame.log_z)).exp_(), (log_v - frame.shift).exp_()


def _carry(updates: Tensor, log_s: Tensor, frame: _Frame) -> tuple[Tensor, Tensor]:
    """M before each chunk (G, N, d_k, E), after the last (G, d_k, E), from every e_k^T e_v; all in their own frames."""
    before = torch.empty_like(updates)
    M = (log_s - _finite(frame.log_z[:, 0]).mT - frame.shift[:, 0]).exp_()
    before[:, 0] = M
    for n in range(1, updates.shape[1]):
        M = torch.mul(M + updates[:, n - 1], frame.factor[:, n])
        before[:, n] = M
    return before, M + updates[:, -1]


def _carry_back(g_seen: Tensor, g_after: Tensor, frame: _Frame) -> tuple[Tensor, Tensor]:
    """Gradient of M before the first chunk (G, d_k, E) and after each chunk (G, N, d_k, E)."""
    g_M = torch.empty_like(g_seen)
    g = g_after
    for n in reversed(range(g_seen.shape[1])):
        g_M[:, n] = g
        g = g + g_seen[:, n]
        if n:
            g = g * frame.factor[:, n]
    return g, g_M


def _finite(x: Tensor) -> Tensor:
    """`x` with 0 for -inf, so that a difference from it is never -inf - -inf."""
    return torch.where(x == -torch.inf, 0, x)
