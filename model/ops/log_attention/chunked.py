"""Log-space attention in chunks, by matrix products: memory is linear in length, and results are exact for any range.

Every sum of the definition has positive terms. So inside a chunk of C tokens it is a product of matrices of
exponentials, and between chunks only the sum so far is carried. The normalizer is one more value column, identically 0.
Each exponential is divided by a power of two, its frame, so that all of them are at most 1:

    2^key[d]      above exp(k[j, d]), for all tokens j up to the chunk's last      e_k = exp(k) 2^-key          (C, d_k)
    2^value[e]    above exp(log_v[j, e]), for the same tokens                      e_v = exp(log_v) 2^-value    (C, E)
    2^row[t]      above exp(q[t, d]) 2^key[d], for all d                           e_q = exp(q) 2^(key - row)   (C, d_k)
    M[d, e]       exp(log_s[d, e]) 2^-(key + value), log_s being the state before the chunk

    sums = e_q M + tril(e_q e_k^T) e_v             log_y = log(sums / its last column) + value ln 2

The key's frame moves from k to q before q's row is scaled, so that the largest term of a row is about 1. After the
chunk, factors of at most 1 convert M + e_k^T e_v to the frame of the next chunk. The frames cancel in log_y, so the
backward pass treats them as constants: it is the transpose of these products, and carries the gradient of M from the
last chunk to the first.

The only risk is that many terms underflow which together matter. Because all terms are positive, a result certifies
itself: a sum of at least CERTAIN (exponentials.py) cannot have lost anything that matters. If a chunk has a smaller
sum, its head is recomputed in float64, whose range is ten times as wide, and if that is not enough in log space
(exact.py). Then the chunk's results and the head's gradients are replaced. A sum whose values are all zero is 0, and
certain. If every key is masked, the result is NaN, without a gradient.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.ops.custom import accumulation_dtype, operator, refuse_second_order, refuse_transforms
from model.ops.gates import log_f_gradient, times
from model.ops.log_attention import exact
from model.ops.log_attention.chunks import CHUNK, batches, block_chunks, blocks, write
from model.ops.log_attention.exponentials import (
    CERTAIN,
    Frames,
    Inputs,
    frames_of,
    gates_at,
    in_first_frame,
    keys_and_values,
    log_of_scaled,
    queries,
)
from model.ops.log_attention.state import LogAttentionState, empty_state

NAMES = "log_attention", "backend='naive'"  # the operator, and the form that has all derivatives


def chunked_log_attention(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None = None,
    *,
    causal: bool = True,
    state: LogAttentionState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LogAttentionState]:
    """As `log_attention`. It saves its inputs and at most T / CHUNK states for the backward pass."""
    state = empty_state(q, log_v) if state is None else state
    refuse_transforms(*NAMES, q, k, log_v, log_f, *state)
    log_s = torch.cat(
        [state.log_s, state.log_z.unsqueeze(-1)], dim=-1
    )  # (B, H, d_k, E), E = d_v + 1
    log_y, log_s, *_ = _attend(
        q, k, log_v, log_f, log_s.to(accumulation_dtype(q)), causal, return_state
    )
    log_y = log_y.to(log_v.dtype)
    return (log_y, LogAttentionState(log_s[..., :-1], log_s[..., -1])) if return_state else log_y


@operator("log_attention")
def _attend(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None,
    log_s: Tensor,
    causal: bool,
    want_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log_y (B, H, T, d_v) and the state after, from the arguments and the state log_s (B, H, d_k, E).

    Two more results are for the backward pass: M before each block and after the last (n + 1, B, H, d_k, E), and which
    chunks are doubtful (N, B, H). Without causality, all tokens are one block, and all chunks are doubtful or none.
    """
    with torch.autocast(q.device.type, enabled=False):
        results = _forward(Inputs(q, k, log_v, log_f, log_s), causal, want_state)
        exact.recomputed_tiles("forward", q.device).add_(results.doubtful.sum())
    return results


class _Results(NamedTuple):
    """The results of `_attend`, for some elements of the batch."""

    log_y: Tensor
    log_s: Tensor
    M: Tensor
    doubtful: Tensor

    def of(self, batch: slice) -> "_Results":
        """Select elements of the batch."""
        return _Results(
            self.log_y[batch], self.log_s[batch], self.M[:, batch], self.doubtful[:, batch]
        )


def _empty_results(inputs: Inputs, causal: bool) -> _Results:
    q, _, log_v, _, log_s = inputs
    (B, H, T, _), (d_k, E) = q.shape, log_s.shape[-2:]
    N = -(-T // CHUNK)
    return _Results(
        torch.empty_like(log_v, dtype=log_s.dtype) if causal else log_s.new_empty(B, H, T, E - 1),
        torch.empty_like(log_s),
        log_s.new_empty(-(-N // block_chunks(q)) + 1 if causal else 2, B, H, d_k, E),
        log_s.new_empty(N, B, H, dtype=torch.bool),
    )


@_attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None,
    log_s: Tensor,
    causal: bool,
    want_state: bool,
) -> tuple[Tensor, ...]:
    return _empty_results(Inputs(q, k, log_v, log_f, log_s), causal)


def _forward(inputs: Inputs, causal: bool, want_state: bool) -> _Results:
    results = _empty_results(inputs, causal)
    for batch in batches(inputs.q):
        some, into = inputs.of(batch), results.of(batch)
        frames, certificate = frames_of(some, causal), exact.Certificate(some)
        (_causal_forward if causal else _full_forward)(some, frames, certificate, into)
        into.log_s.copy_(log_of_scaled(into.M[-1], frames.last))
        if frames.lost is not None:
            into.doubtful.logical_or_(frames.lost)
        heads = into.doubtful.any(0)  # (B, H)
        if want_state:
            heads |= certificate.lost_heads(into.M[-1])
        if heads.any():
            _forward_again(some, causal, heads, into)
    return results


def _causal_forward(
    inputs: Inputs, frames: Frames, certificate: exact.Certificate, results: _Results
) -> None:
    results.M[0] = in_first_frame(inputs, frames)
    for i, (tokens, chunks) in enumerate(blocks(inputs.q)):
        here = frames.at(inputs, tokens, chunks)
        gates = gates_at(inputs, tokens, here)
        e_q = queries(inputs, tokens, here)  # (n, B, H, C, d_k)
        e_k, e_v = keys_and_values(inputs, tokens, here)  # (n, B, H, C, .)
        M = _carry(results.M[i], times(e_k, gates.end).mT @ e_v, gates.kept, here.factor)
        results.M[i + 1] = M[-1]
        A = gates.weigh(e_q @ e_k.mT)  # (n, B, H, C, C)
        sums = _add_product(times(e_q, gates.start) @ M[:-1], A, e_v)  # (n, B, H, C, E)
        write(results.log_y[:, :, tokens], _log_y(sums, here))
        results.doubtful[chunks] = certificate.too_small(sums, tokens.start)


def _full_forward(
    inputs: Inputs, frames: Frames, certificate: exact.Certificate, results: _Results
) -> None:
    """Every query attends to all keys: they are summed into M, which the queries read."""
    M = results.M  # (2, B, H, d_k, E)
    M[:] = in_first_frame(inputs, frames)
    for tokens, _ in blocks(inputs.k):
        e_k, e_v = keys_and_values(inputs, tokens, frames)  # (1, B, H, s, .)
        M[1:].add_(e_k.mT @ e_v)
    results.doubtful.zero_()
    for tokens, _ in blocks(inputs.q):
        sums = queries(inputs, tokens, frames) @ M[1:]  # (1, B, H, t, E)
        write(results.log_y[:, :, tokens], _log_y(sums, frames))
        results.doubtful.logical_or_(certificate.too_small(sums, None))


def _log_y(sums: Tensor, frames: Frames) -> Tensor:
    return log_of_scaled(sums[..., :-1] / sums[..., -1:], frames.value[..., :-1])


def _forward_again(inputs: Inputs, causal: bool, heads: Tensor, results: _Results) -> None:
    """Recompute the doubtful tiles and the last state of these heads (B, H).

    float64 suffices for nearly all sums that are doubtful in float32; the others are computed in log space.
    """
    some = _of_heads(inputs, heads)
    doubtful, log_y = results.doubtful[:, heads].mT, results.log_y[heads]  # (F, N), (F, T, d_v)
    if inputs.log_s.dtype == torch.float64:
        if causal:
            log_y, log_s = exact.forward(some, doubtful, log_y)
        else:
            (_, read), (_, seen) = _full_as_causal(some)
            log_y, log_s = seen.log_y[:, 0], read.log_s[:, 0]
    else:
        again = _forward(some, causal, want_state=True)
        doubtful = doubtful.repeat_interleave(CHUNK, 1)[:, : inputs.q.shape[2]]
        log_y = torch.where(doubtful.unsqueeze(-1), again.log_y[:, 0].to(log_y.dtype), log_y)
        log_s = again.log_s[:, 0]
    results.log_y[heads], results.log_s[heads] = log_y, log_s.to(results.log_s.dtype)


def _full_as_causal(inputs: Inputs) -> list[tuple[Inputs, _Results]]:
    """Two causal passes with their results: keys are read into a state, which queries without keys then see."""
    q, k, log_v, _, _ = inputs
    reader = inputs._replace(q=torch.zeros_like(k))
    read = _forward(reader, causal=True, want_state=True)
    no_values = log_v.new_zeros(*q.shape[:3], log_v.shape[3])
    seer = Inputs(q, torch.full_like(q, -torch.inf), no_values, None, read.log_s)
    return [(reader, read), (seer, _forward(seer, causal=True, want_state=False))]


def _of_heads(inputs: Inputs, heads: Tensor) -> Inputs:
    """Select heads (B, H) as elements of a batch, in float64: (F, 1, ...)."""
    return inputs.each(lambda x: x[heads].unsqueeze(1).double())


@operator("log_attention_backward")
def _attend_backward(
    g: Sequence[Tensor], inputs: Sequence[Tensor | None], M: Tensor, doubtful: Tensor, causal: bool
) -> list[Tensor]:
    """Return gradients of `Inputs` (empty without gates) from those of log_y and of the state after, both in `g`."""
    own = Inputs._make(inputs)
    with torch.autocast(own.q.device.type, enabled=False):
        gradients = _backward(own, causal, M, doubtful, *g)
        exact.recomputed_tiles("backward", own.q.device).add_(doubtful.sum())
    return _or_empty(gradients)


@_attend_backward.register_fake
def _(g: Any, inputs: Sequence[Tensor | None], *_: Any) -> list[Tensor]:
    return _or_empty(Inputs._make(inputs).each(torch.empty_like))


def _or_empty(gradients: Inputs) -> list[Tensor]:
    """Tensors for an operator that must return some."""
    return [gradients.q.new_empty(0) if x is None else x for x in gradients]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.causal, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.mark_non_differentiable(*output[2:])


def _backward_of_op(
    ctx: Any, g_y: Tensor, g_log_s: Tensor, *_: Tensor
) -> tuple[Tensor | None, ...]:
    refuse_second_order(*NAMES)
    *inputs, M, doubtful = ctx.saved_tensors
    gradients = _attend_backward([g_y, g_log_s], inputs, M, doubtful, ctx.causal)
    return *(None if x is None else g for x, g in zip(inputs, gradients, strict=True)), None, None


_attend.register_autograd(_backward_of_op, setup_context=_save_for_backward)


def _backward(
    inputs: Inputs, causal: bool, M: Tensor, doubtful: Tensor, g_y: Tensor, g_log_s: Tensor
) -> Inputs:
    """Return the gradients, given M and what is doubtful from the forward pass."""
    gradients = inputs.each(torch.empty_like)
    for batch in batches(inputs.q):
        some, g, into = inputs.of(batch), (g_y[batch], g_log_s[batch]), gradients.of(batch)
        saved = M[:, batch], doubtful[:, batch]
        g_M, lost = _of_last_M(some, saved[0][-1], g[1])  # (B, H, d_k, E), (B, H)
        heads = saved[1].any(0) | lost  # (B, H)
        (_causal_backward if causal else _full_backward)(some, *saved, g[0], g_M, into)
        if heads.any():
            _backward_again(some, causal, g, heads, into)
    return gradients


def _causal_backward(
    inputs: Inputs, M: Tensor, doubtful: Tensor, g_y: Tensor, g: Tensor, gradients: Inputs
) -> None:
    """Write the gradients, given those of log_y and of the last M, g (B, H, d_k, E)."""
    frames = frames_of(inputs, causal=True)
    for i, (tokens, chunks) in reversed(list(enumerate(blocks(inputs.q)))):
        here = frames.at(inputs, tokens, chunks)
        gates = gates_at(inputs, tokens, here)
        e_q = queries(inputs, tokens, here)  # (n, B, H, C, d_k)
        e_k, e_v = keys_and_values(inputs, tokens, here)  # (n, B, H, C, .)
        from_start, to_end = times(e_q, gates.start), times(e_k, gates.end)
        Ms = _carry(M[i], to_end.mT @ e_v, gates.kept, here.factor)  # (n + 1, B, H, d_k, E)
        A = gates.weigh(e_q @ e_k.mT)  # (n, B, H, C, C)
        sums = _add_product(from_start @ Ms[:-1], A, e_v)
        g_sums = _of_sums(sums, doubtful, g_y, tokens, here)  # (n, B, H, C, E)
        g_seen = (
            from_start.mT @ g_sums
        )  # (n, B, H, d_k, E): gradient of M through the chunk's queries
        g_A = gates.weigh(g_sums @ e_v.mT)
        g_q = _add_product(times(g_sums @ Ms[:-1].mT, gates.start), g_A, e_k).mul_(e_q)
        g_k = g_A.mT @ e_q  # through the chunk's own queries, without the factor e_k
        g_v = A.mT @ g_sums
        g_last = g
        g_M, g = _carry_back(g_seen, g, gates.kept, here.factor)
        # And through later chunks.
        g_k = _add_product(g_k, times(e_v, gates.end), g_M.mT).mul_(e_k)
        g_v = _add_product(g_v, to_end, g_M).mul_(e_v)[..., :-1]
        write(gradients.q[:, :, tokens], g_q)
        write(gradients.k[:, :, tokens], g_k)
        write(gradients.log_v[:, :, tokens], g_v)
        if inputs.log_f is not None and gradients.log_f is not None:
            log_f = here.split(inputs.log_f[:, :, tokens], 0.0)
            g_next = torch.cat(
                [times(g_M, gates.kept)[1:] + g_seen[1:], g_last.unsqueeze(0)]
            )  # of Ms[1:]
            g_after = (g_next * Ms[1:]).sum(-1).unsqueeze(3)  # (n, B, H, 1, d_k)
            write(gradients.log_f[:, :, tokens], log_f_gradient(g_q, g_k, g_after, log_f))
    torch.mul(g, M[0], out=gradients.log_s)


def _full_backward(
    inputs: Inputs, M: Tensor, doubtful: Tensor, g_y: Tensor, g: Tensor, gradients: Inputs
) -> None:
    frames = frames_of(inputs, causal=False)
    for tokens, _ in blocks(inputs.q):
        e_q = queries(inputs, tokens, frames)  # (1, B, H, t, d_k)
        g_sums = _of_sums(e_q @ M[1:], doubtful, g_y, tokens, frames)
        write(gradients.q[:, :, tokens], (g_sums @ M[1:].mT).mul_(e_q))
        g = g + (e_q.mT @ g_sums)[0]
    for tokens, _ in blocks(inputs.k):
        e_k, e_v = keys_and_values(inputs, tokens, frames)  # (1, B, H, s, .)
        write(gradients.k[:, :, tokens], (e_v @ g.mT).mul_(e_k))
        write(gradients.log_v[:, :, tokens], (e_k @ g).mul_(e_v)[..., :-1])
    torch.mul(g, M[0], out=gradients.log_s)


def _of_last_M(inputs: Inputs, M: Tensor, g_log_s: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the last M (B, H, d_k, E), and the heads (B, H) where it is doubtful."""
    unused = g_log_s == 0
    lost = exact.Certificate(inputs).lost_heads(M.masked_fill(unused, 1))
    return torch.where(unused | (M == 0), 0, g_log_s / M), lost


def _of_sums(sums: Tensor, doubtful: Tensor, g_y: Tensor, tokens: slice, frames: Frames) -> Tensor:
    """Return the gradient of the sums (n, B, H, C, E), given log_y's gradient: 0 for doubtful and empty sums."""
    g_y = frames.split(g_y[:, :, tokens], 0.0)
    g_sums = torch.cat([g_y, g_y.sum(-1, keepdim=True).neg_()], dim=-1).div_(sums)
    if not sums.amin() >= CERTAIN[sums.dtype]:  # also true if a sum is NaN
        g_sums.masked_fill_(doubtful[frames.chunks][..., None, None] | (sums == 0), 0)
    return g_sums


def _backward_again(
    inputs: Inputs, causal: bool, g: tuple[Tensor, ...], heads: Tensor, gradients: Inputs
) -> None:
    """Recompute the gradients of these heads (B, H), as `_forward_again` does for the results."""
    some, (g_y, g_log_s) = _of_heads(inputs, heads), (x[heads].unsqueeze(1).double() for x in g)
    if inputs.log_s.dtype != torch.float64:
        again = _backward(some, causal, *_forward(some, causal, want_state=True)[2:], g_y, g_log_s)
    elif causal:
        g_log_S = torch.cat([g_y, -g_y.sum(-1, keepdim=True)], dim=-1)  # (F, 1, T, E)
        again = exact.backward(some, g_log_S[:, 0], g_log_s[:, 0])
    else:
        (reader, read), (seer, seen) = _full_as_causal(some)
        of_q, *_, g_read = _backward(seer, True, *seen[2:], g_y, torch.zeros_like(g_log_s))
        unseen = torch.zeros_like(some.log_v)
        again = _backward(reader, True, *read[2:], unseen, g_read + g_log_s)._replace(q=of_q)
    for whole, part in zip(gradients, again, strict=True):
        if whole is None or part is None:
            continue
        # The exact log_v also has the normalizer's column.
        whole[heads] = part.reshape(-1, *part.shape[-2:])[..., : whole.shape[-1]].to(whole.dtype)


def _carry(M: Tensor, updates: Tensor, kept: Tensor | None, factor: Tensor) -> Tensor:
    """Return M before each of these chunks and after the last, (n + 1, B, H, d_k, E), each in its chunk's frame.

    `M` precedes the first chunk, `updates` are the chunks' e_k^T e_v (n, B, H, d_k, E), `kept` is Gates.kept, and
    `factor` is Frames.factor.
    """
    Ms = M.new_empty(len(updates) + 1, *M.shape)
    Ms[0] = M
    for n, update in enumerate(updates):
        torch.add(times(Ms[n], None if kept is None else kept[n]), update, out=Ms[n + 1])
        if n < len(factor):
            Ms[n + 1].mul_(factor[n])
    return Ms


def _carry_back(
    g_seen: Tensor, g: Tensor, kept: Tensor | None, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gradients of M after each chunk (n, B, H, d_k, E), in its own frame, and before the first.

    `g_seen` is the gradient through the chunks' queries, and `g` that of the last M that `_carry` returns.
    """
    g_M = torch.empty_like(g_seen)
    for n in reversed(range(len(g_seen))):
        if n < len(factor):
            torch.mul(g, factor[n], out=g_M[n])
        else:
            g_M[n] = g
        g = times(g_M[n], None if kept is None else kept[n]) + g_seen[n]
    return g_M, g


def _add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x += a @ b, all (n, B, H, ., .)."""
    x.flatten(0, 2).baddbmm_(a.flatten(0, 2), b.flatten(0, 2))
    return x
