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

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.ops.log_attention import repair
from model.ops.log_attention.chunks import CHUNK, write
from model.ops.log_attention.exponentials import Frames, Inputs, frames_of, in_first_frame, keys_and_values, queries
from model.ops.log_attention.frames import log_of_scaled, scaled_exp
from model.ops.log_attention.state import LogAttentionState, accumulation_dtype, empty_state

# Numbers of a temporary that a core works on, so that its cache holds all that a step needs. A GPU gets all at once.
BLOCK = 2**17


def chunked_log_attention(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    *,
    causal: bool = True,
    state: LogAttentionState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LogAttentionState]:
    """As `log_attention`. For the backward pass it keeps its inputs, log_y, and at most T / CHUNK states."""
    state = empty_state(q, log_v) if state is None else state
    log_s = torch.cat([state.log_s, state.log_z.unsqueeze(-1)], dim=-1)  # (B, H, d_k, E), E = d_v + 1
    log_y, log_s, *_ = _attend(q, k, log_v, log_s.to(accumulation_dtype(q)), causal, return_state)
    log_y = log_y.to(log_v.dtype)
    return (log_y, LogAttentionState(log_s[..., :-1], log_s[..., -1])) if return_state else log_y


@torch.library.custom_op("log_gpt::log_attention", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, log_v: Tensor, log_s: Tensor, causal: bool, want_state: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`log_attention`'s q, k, log_v and the state log_s (B, H, d_k, E) -> log_y (B, H, T, d_v), the state after.

    Then, for the backward pass: M before each block and after the last (n + 1, B, H, d_k, E), the last column of the
    sums (B, H, T), and which chunks are doubtful (N, B, H). Not causal, all tokens are one chunk.
    """
    results = _empty_results(q, k, log_v, log_s, causal)
    attend = _causal_forward if causal else _full_forward
    with torch.autocast(q.device.type, enabled=False):
        for batch in _batches(q):
            attend(Inputs(q, k, log_v, log_s).of(batch), want_state, results.of(batch))
    return results


class _Results(NamedTuple):
    """Of `_attend`, for some elements of the batch."""

    log_y: Tensor
    log_s: Tensor
    M: Tensor
    total: Tensor
    doubtful: Tensor

    def of(self, batch: slice) -> "_Results":
        """Those of fewer elements."""
        log_y, log_s, M, total, doubtful = self
        return _Results(log_y[batch], log_s[batch], M[:, batch], total[batch], doubtful[:, batch])


class _Given(NamedTuple):
    """The gradients that the backward pass starts from."""

    log_y: Tensor
    log_s: Tensor

    def of(self, batch: slice) -> "_Given":
        """Those of fewer elements."""
        return _Given(self.log_y[batch], self.log_s[batch])


def _empty_results(q: Tensor, k: Tensor, log_v: Tensor, log_s: Tensor, causal: bool) -> _Results:
    (B, H, T, _), (d_k, E) = q.shape, log_s.shape[-2:]
    N, blocks = (-(-T // CHUNK), len(_blocks(q))) if causal else (1, 1)
    return _Results(
        torch.empty_like(log_v, dtype=log_s.dtype) if causal else log_s.new_empty(B, H, T, E - 1),
        torch.empty_like(log_s),
        log_s.new_empty(blocks + 1, B, H, d_k, E),
        log_s.new_empty(B, H, T),
        log_s.new_empty(N, B, H, dtype=torch.bool),
    )


@_attend.register_fake
def _(q: Tensor, k: Tensor, log_v: Tensor, log_s: Tensor, causal: bool, want_state: bool) -> tuple[Tensor, ...]:
    return tuple(_empty_results(q, k, log_v, log_s, causal))


def _causal_forward(inputs: Inputs, want_state: bool, results: _Results) -> None:
    frames = frames_of(inputs, causal=True)
    results.M[0] = in_first_frame(inputs, frames)
    for i, (tokens, chunks) in enumerate(_blocks(inputs.q)):
        here = frames.of(chunks)
        e_q, (e_k, e_v) = queries(inputs, tokens, here), keys_and_values(inputs, tokens, here)  # (n, B, H, C, .)
        M = _carry(results.M[i], e_k.mT @ e_v, frames.factor, chunks)  # (n + 1, B, H, d_k, E)
        results.M[i + 1] = M[-1]
        sums = e_q @ M[:-1]  # (n, B, H, C, E)
        _add_product(sums, (e_q @ e_k.mT).tril_(), e_v)
        _write_log_y(results, tokens, sums, here)
        results.doubtful[chunks] = repair.too_small(inputs, sums, tokens)
    _finish(inputs, True, want_state, frames, results)


def _full_forward(inputs: Inputs, want_state: bool, results: _Results) -> None:
    """Every query sees the state after all keys."""
    frames = frames_of(inputs, causal=False)
    M, doubtful = results.M, results.doubtful.fill_(False)  # (2, B, H, d_k, E), (1, B, H)
    M[:] = in_first_frame(inputs, frames)
    for tokens, _ in _blocks(inputs.k):
        e_k, e_v = keys_and_values(inputs, tokens, frames)  # (1, B, H, s, .)
        M[1:].add_(e_k.mT @ e_v)
    for tokens, _ in _blocks(inputs.q):
        sums = queries(inputs, tokens, frames) @ M[1:]  # (1, B, H, t, E)
        _write_log_y(results, tokens, sums, frames)
        doubtful |= repair.too_small(inputs, sums, slice(-1, None))
    _finish(inputs, False, want_state, frames, results)


def _write_log_y(results: _Results, tokens: slice, sums: Tensor, frames: Frames) -> None:
    log_y = log_of_scaled(sums[..., :-1] / sums[..., -1:], frames.value[..., :-1])
    write(results.log_y[:, :, tokens], log_y)
    write(results.total[:, :, tokens].unsqueeze(-1), sums[..., -1:])


def _finish(inputs: Inputs, causal: bool, want_state: bool, frames: Frames, results: _Results) -> None:
    """The last state, and the exact form of what is not certain."""
    M, log_s, doubtful = results.M[-1], results.log_s, results.doubtful
    log_s.copy_(log_of_scaled(M, frames.key[-1].mT + frames.value[-1]))
    lost = repair.lost_heads(inputs, M, want_state)
    if doubtful.any() or lost.any():
        log_y, last = results.log_y.flatten(0, 1).contiguous(), log_s.flatten(0, 1).contiguous()
        repair.forward(repair.call_of(inputs, causal), doubtful.flatten(1).mT, lost.flatten(), log_y, last)
        results.log_y.copy_(log_y.view(results.log_y.shape))
        log_s.copy_(last.view(log_s.shape))


@torch.library.custom_op("log_gpt::log_attention_backward", mutates_args=())
def _attend_backward(
    g_y: Tensor,
    g_log_s: Tensor,
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_s: Tensor,
    log_y: Tensor,
    after: Tensor,
    M: Tensor,
    total: Tensor,
    doubtful: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, log_v and log_s, from those of log_y (B, H, T, d_v) and of the state after (B, H, d_k, E)."""
    inputs, results = Inputs(q, k, log_v, log_s), _Results(log_y, after, M, total, doubtful)
    gradients = Inputs(*(torch.empty_like(x) for x in inputs))
    go_back = _causal_backward if causal else _full_backward
    with torch.autocast(q.device.type, enabled=False):
        for batch in _batches(q):
            go_back(inputs.of(batch), results.of(batch), _Given(g_y, g_log_s).of(batch), gradients.of(batch))
    return gradients


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.causal, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[2:])


def _backward(ctx: Any, g_y: Tensor, g_log_s: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *_attend_backward(g_y, g_log_s, *ctx.saved_tensors, ctx.causal), None, None


_attend.register_autograd(_backward, setup_context=_save_for_backward)


@_attend_backward.register_fake
def _(g_y: Tensor, g_log_s: Tensor, q: Tensor, k: Tensor, log_v: Tensor, log_s: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (q, k, log_v, log_s))


def _causal_backward(inputs: Inputs, results: _Results, given: _Given, gradients: Inputs) -> None:
    frames = frames_of(inputs, causal=True)
    g, lost = _of_last_M(inputs, results.M[-1], given)  # (B, H, d_k, E)
    again = bool(results.doubtful.any() or lost.any())
    for i, (tokens, chunks) in reversed(list(enumerate(_blocks(inputs.q, whole=again)))):
        here = frames.of(chunks)
        e_q, (e_k, e_v) = queries(inputs, tokens, here), keys_and_values(inputs, tokens, here)  # (n, B, H, C, .)
        before = _carry(results.M[i], e_k.mT @ e_v, frames.factor, chunks)[:-1]  # (n, B, H, d_k, E)
        g_sums = _of_sums(results, given, tokens, here)  # (n, B, H, C, E)
        g_seen = e_q.mT @ g_sums  # (n, B, H, d_k, E): of the M that the chunk's queries saw
        g_A = (g_sums @ e_v.mT).tril_()  # (n, B, H, C, C)
        g_q = _add_product(g_sums @ before.mT, g_A, e_k).mul_(e_q)
        g_k = g_A.mT @ e_q  # through the chunk's own queries, but for the factor e_k
        g_v = (e_q @ e_k.mT).tril_().mT @ g_sums
        if again:
            dense = repair.Dense(g_q, g_k * e_k, g_v * e_v, g_seen, e_k, e_v, before)
        g_M, g = _carry_back(g_seen, g, frames.factor, chunks)
        write(gradients.q[:, :, tokens], g_q)
        write(gradients.k[:, :, tokens], _add_product(g_k, e_v, g_M.mT).mul_(e_k))  # and of later chunks
        write(gradients.log_v[:, :, tokens], _add_product(g_v, e_k, g_M).mul_(e_v)[..., :-1])
    torch.mul(g, results.M[0], out=gradients.log_s)
    if again:
        _repair_backward(inputs, results, lost, given, dense, gradients)


def _full_backward(inputs: Inputs, results: _Results, given: _Given, gradients: Inputs) -> None:
    frames = frames_of(inputs, causal=False)
    g, lost = _of_last_M(inputs, results.M[1], given)  # (B, H, d_k, E)
    for tokens, _ in _blocks(inputs.q):
        e_q, g_sums = queries(inputs, tokens, frames), _of_sums(results, given, tokens, frames)  # (1, B, H, t, .)
        write(gradients.q[:, :, tokens], (g_sums @ results.M[1:].mT).mul_(e_q))
        g = g + (e_q.mT @ g_sums)[0]
    for tokens, _ in _blocks(inputs.k):
        e_k, e_v = keys_and_values(inputs, tokens, frames)  # (1, B, H, s, .)
        write(gradients.k[:, :, tokens], (e_v @ g.mT).mul_(e_k))
        write(gradients.log_v[:, :, tokens], (e_k @ g).mul_(e_v)[..., :-1])
    torch.mul(g, results.M[0], out=gradients.log_s)
    if results.doubtful.any() or lost.any():
        _repair_backward(inputs, results, lost, given, None, gradients)


def _of_last_M(inputs: Inputs, M: Tensor, given: _Given) -> tuple[Tensor, Tensor]:
    """Gradient of the last M (B, H, d_k, E), and the heads (B, H) where it is not certain."""
    nothing = (given.log_s == 0) | (M == 0)
    return torch.where(nothing, 0, given.log_s / M), repair.lost_heads(inputs, M.masked_fill(given.log_s == 0, 1))


def _of_sums(results: _Results, given: _Given, tokens: slice, frames: Frames) -> Tensor:
    """Gradient of the sums (n, B, H, C, E), from that of log_y: 0 where they are doubtful, or sums of nothing."""
    log_y = frames.split(results.log_y[:, :, tokens], torch.inf)
    if log_y.amin() == -torch.inf:
        log_y = log_y.masked_fill(log_y == -torch.inf, torch.inf)
    total = frames.split(results.total[:, :, tokens].unsqueeze(-1), 1.0)
    g_y = frames.split(given.log_y[:, :, tokens], 0.0)
    g_ratio = scaled_exp(-log_y, -frames.value[..., :-1]).mul_(g_y)  # sum = total exp(log_y) 2^-value
    g_sums = torch.cat([g_ratio, g_y.sum(-1, keepdim=True).neg_()], dim=-1).div_(total)
    doubtful = results.doubtful[frames.chunks]
    if doubtful.any() or (total == 0).any():
        g_sums.masked_fill_(doubtful[..., None, None] | (total == 0), 0)
    return g_sums


def _repair_backward(
    inputs: Inputs, results: _Results, lost: Tensor, given: _Given, dense: repair.Dense | None, gradients: Inputs
) -> None:
    g_y, g_log_s = (x.flatten(0, 1).to(inputs.log_s.dtype) for x in given)
    g_log_S = torch.cat([g_y, -g_y.sum(-1, keepdim=True)], dim=-1)  # (G, T, E), G = B H
    if dense is not None:
        dense = repair.Dense(*(x.flatten(1, 2).transpose(0, 1) for x in dense))  # (G, N, ., .)
    doubtful, flat = results.doubtful.flatten(1).mT, [x.flatten(0, 1).contiguous() for x in gradients]
    repair.backward(repair.call_of(inputs, dense is not None), doubtful, lost.flatten(), g_log_S, g_log_s, dense, flat)
    for whole, part in zip(gradients, flat, strict=True):
        whole.copy_(part.view(whole.shape))


def _carry(M: Tensor, updates: Tensor, factor: Tensor, chunks: slice) -> Tensor:
    """M before each of these chunks and after the last, (n + 1, B, H, d_k, E), each in its chunk's frame.

    From M before the first and the chunks' e_k^T e_v (n, B, H, d_k, E).
    """
    Ms = M.new_empty(len(updates) + 1, *M.shape)
    Ms[0] = M
    for n, update in enumerate(updates):
        torch.add(Ms[n], update, out=Ms[n + 1])
        if chunks.start + n + 1 < len(factor):
            Ms[n + 1].mul_(factor[chunks.start + n + 1])
    return Ms


def _carry_back(g_seen: Tensor, g: Tensor, factor: Tensor, chunks: slice) -> tuple[Tensor, Tensor]:
    """From the gradient of M after the last of these chunks: after each (n, B, H, d_k, E), and before the first."""
    g_M = torch.empty_like(g_seen)
    for n in reversed(range(chunks.start, chunks.stop)):
        g_M[n - chunks.start] = g
        g = g + g_seen[n - chunks.start]
        if n:
            g.mul_(factor[n])
    return g_M, g


def _add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x += a @ b, all (n, B, H, ., .)."""
    x.flatten(0, 2).baddbmm_(a.flatten(0, 2), b.flatten(0, 2))
    return x


def _block_size(x: Tensor) -> tuple[int, int]:
    """Of x (B, H, T, D): elements of the batch, and chunks of each, in a block."""
    B, H, T, D = x.shape
    N = -(-T // CHUNK)
    if x.device.type != "cpu":
        return B, N
    fit = max(1, BLOCK * torch.get_num_threads() // (H * CHUNK * D))
    n_blocks = -(-N // fit)
    return min(B, max(1, fit // N)), -(-N // n_blocks)  # blocks of one size


def _batches(q: Tensor) -> Iterator[slice]:
    B, step = len(q), _block_size(q)[0]
    return (slice(b, min(b + step, B)) for b in range(0, B, step))


def _blocks(x: Tensor, whole: bool = False) -> list[tuple[slice, slice]]:
    """Tokens of x (B, H, T, D), and the chunks that they are: block by block, or the whole as one."""
    T = x.shape[2]
    N = -(-T // CHUNK)
    step = N if whole else _block_size(x)[1]
    return [(slice(CHUNK * n, min(CHUNK * (n + step), T)), slice(n, min(n + step, N))) for n in range(0, N, step)]
