"""Log-space attention in chunks, by matrix products, with memory linear in length and exact results
for any range.

Every sum of the definition has positive terms. So inside a chunk of C tokens it is a product of
matrices of exponentials, and between chunks only the sum so far is carried. The normalizer is one
more value column, identically 0. Each exponential is divided by a power of two, its frame, so that
all of them are at most 1:

    2^key[d]      above exp(k[j, d]), for all tokens j up to the chunk's last
    2^value[e]    above exp(log_v[j, e]), for the same tokens
    2^row[t]      above exp(q[t, d]) 2^key[d], for all d

    e_k = exp(k) 2^-key              (C, d_k)
    e_v = exp(log_v) 2^-value        (C, E)
    e_q = exp(q) 2^(key - row)       (C, d_k)
    M = exp(log_s) 2^-(key + value)  (d_k, E), log_s being the state before the chunk

    sums = e_q M + tril(e_q e_k^T) e_v             log_y = log(sums / its last column) + value ln 2

The key's frame moves from k to q before q's row is scaled, so that the largest term of a row is
about 1. After the chunk, factors of at most 1 convert M + e_k^T e_v to the frame of the next chunk.
The frames cancel in log_y, so the backward pass treats them as constants: it is the transpose of
these products, and carries the gradient of M from the last chunk to the first.

The only risk is that many terms underflow which together matter. Because all terms are positive, a
result certifies itself: a sum of at least CERTAIN (exponentials.py) cannot have lost anything that
matters. If a chunk of a head has a smaller sum, exact.py computes its results again in log space,
and the head's gradients. A sum whose values are all zero is 0, and certain. If every key is masked,
the result is NaN, without a gradient.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.numbers import ceil_div
from model.ops.custom import (
    CHUNK,
    accumulation_dtype,
    operator,
    refuse_second_order,
    refuse_transforms,
    split,
)
from model.ops.gates import Gates, log_f_gradient, times
from model.ops.log_attention import exact
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
# Elements of a temporary on a CPU, so that a step fits into its cache. Other devices process all
# chunks at once.
STEP = 2**19


def chunked_log_attention(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None = None,
    *,
    state: LogAttentionState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LogAttentionState]:
    """As causal `log_attention`. It saves its inputs and at most T / CHUNK states."""
    if state is None:
        state = empty_state(q, log_v)
    refuse_transforms(*NAMES, q, k, log_v, log_f, *state)
    columns = [state.log_s, state.log_z.unsqueeze(-1)]
    log_s = torch.cat(columns, dim=-1).to(accumulation_dtype(q))  # (B, H, d_k, E), E = d_v + 1
    log_y, log_s, *_ = _attend(q, k, log_v, log_f, log_s, return_state)
    log_y = log_y.to(log_v.dtype)
    if not return_state:
        return log_y
    return log_y, LogAttentionState(log_s[..., :-1], log_s[..., -1])


@operator("log_attention")
def _attend(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None,
    log_s: Tensor,
    want_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log_y (B, H, T, d_v) and the state after the tokens, from the state log_s (B, H, d_k,
    E) before them.

    Two more results are for the backward pass: M before each step and after the last (n + 1, B, H,
    d_k, E), and which chunks are doubtful (N, B, H).
    """
    with torch.autocast(q.device.type, enabled=False):
        results = _forward(Inputs(q, k, log_v, log_f, log_s), want_state)
        exact.recomputed_tiles("forward", q.device).add_(results.doubtful.sum())
    return results


class _Results(NamedTuple):
    """The results of `_attend`, for some elements of the batch."""

    log_y: Tensor
    log_s: Tensor
    M: Tensor
    doubtful: Tensor

    def select(self, batch: slice) -> "_Results":
        """Select elements of the batch."""
        return _Results(
            self.log_y[batch], self.log_s[batch], self.M[:, batch], self.doubtful[:, batch]
        )


def _empty_results(inputs: Inputs) -> _Results:
    log_s = inputs.log_s
    N = ceil_div(inputs.q.shape[2], CHUNK)
    n_steps = ceil_div(N, step_chunks(inputs.q))
    return _Results(
        torch.empty_like(inputs.log_v, dtype=log_s.dtype),
        torch.empty_like(log_s),
        log_s.new_empty(n_steps + 1, *log_s.shape),
        log_s.new_empty(N, *log_s.shape[:2], dtype=torch.bool),
    )


@torch.library.register_fake(_attend)
def _(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None,
    log_s: Tensor,
    want_state: bool,
) -> tuple[Tensor, ...]:
    return _empty_results(Inputs(q, k, log_v, log_f, log_s))


def _forward(all_inputs: Inputs, want_state: bool) -> _Results:
    all_results = _empty_results(all_inputs)
    for batch in batches(all_inputs.q):
        inputs = all_inputs.select(batch)
        results = all_results.select(batch)
        frames = frames_of(inputs)
        certificate = exact.Certificate(inputs)
        results.M[0] = in_first_frame(inputs, frames)
        for i, (tokens, chunks) in enumerate(steps(inputs.q)):
            step = _step(inputs, frames, results.M[i], tokens, chunks)
            results.M[i + 1] = step.M[-1]
            mean = step.sums[..., :-1] / step.sums[..., -1:]
            log_y = log_of_scaled(mean, step.frames.value[..., :-1])
            write(results.log_y[:, :, tokens], log_y)
            results.doubtful[chunks] = certificate.too_small(step.sums, tokens.start)
        results.log_s.copy_(log_of_scaled(results.M[-1], frames.last))
        if frames.lost is not None:
            results.doubtful.logical_or_(frames.lost)
        heads = results.doubtful.any(0)  # (B, H)
        if want_state:
            heads |= certificate.lost_heads(results.M[-1])
        if heads.any():
            _forward_again(inputs, heads, results)
    return all_results


class _Step(NamedTuple):
    """What both passes compute of n chunks."""

    frames: Frames
    gates: Gates
    e_q: Tensor
    """(n, B, H, C, d_k)."""
    e_k: Tensor
    """(n, B, H, C, d_k)."""
    e_v: Tensor
    """(n, B, H, C, E)."""
    from_start: Tensor
    """(n, B, H, C, d_k): e_q, times what gates keep of the state before the chunk."""
    to_end: Tensor
    """(n, B, H, C, d_k): e_k, times what gates keep of a key after the chunk."""
    M: Tensor
    """(n + 1, B, H, d_k, E): before each chunk and after the last."""
    A: Tensor
    """(n, B, H, C, C): scores within a chunk."""
    sums: Tensor
    """(n, B, H, C, E)."""


def _step(inputs: Inputs, frames: Frames, M: Tensor, tokens: slice, chunks: slice) -> _Step:
    """Compute some chunks, given M before the first (B, H, d_k, E)."""
    frames = frames.at(chunks)
    gates = gates_at(inputs, tokens, frames)
    e_q = queries(inputs, tokens, frames)
    e_k, e_v = keys_and_values(inputs, tokens, frames)
    from_start = times(e_q, gates.start)
    to_end = times(e_k, gates.end)
    M = _carry(M, to_end.mT @ e_v, gates.decay, frames.factor)
    A = gates.weigh(e_q @ e_k.mT)
    sums = _add_product(from_start @ M[:-1], A, e_v)
    return _Step(frames, gates, e_q, e_k, e_v, from_start, to_end, M, A, sums)


def _forward_again(inputs: Inputs, heads: Tensor, results: _Results) -> None:
    """Recompute the doubtful tiles and the last state of these heads (B, H) in log space."""
    doubtful = results.doubtful[:, heads].mT
    log_y, log_s = exact.forward(_in_float64(inputs, heads), doubtful, results.log_y[heads])
    results.log_y[heads] = log_y
    results.log_s[heads] = log_s.to(results.log_s.dtype)


def _in_float64(inputs: Inputs, heads: Tensor) -> Inputs:
    """Select G heads (B, H) in float64: (G, ...)."""
    return inputs.map(lambda x: x[heads].double())


@operator("log_attention_backward")
def _attend_backward(
    g: Sequence[Tensor], inputs: Sequence[Tensor | None], M: Tensor, doubtful: Tensor
) -> list[Tensor]:
    """Return gradients of `Inputs` (empty without gates), given those of log_y and of the state
    after in `g`."""
    tensors = Inputs._make(inputs)
    device = tensors.q.device
    with torch.autocast(device.type, enabled=False):
        gradients = _backward(tensors, M, doubtful, *g)
        exact.recomputed_tiles("backward", device).add_(doubtful.sum())
    return _or_empty(gradients)


@torch.library.register_fake(_attend_backward)
def _(g: Any, inputs: Sequence[Tensor | None], *_: Any) -> list[Tensor]:
    return _or_empty(Inputs._make(inputs).map(torch.empty_like))


def _or_empty(gradients: Inputs) -> list[Tensor]:
    """Tensors for an operator that must return some."""
    return [gradients.q.new_empty(0) if x is None else x for x in gradients]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.mark_non_differentiable(*output[2:])


def _backward_of_op(
    ctx: Any, g_y: Tensor, g_log_s: Tensor, *_: Tensor
) -> tuple[Tensor | None, ...]:
    refuse_second_order(*NAMES)
    *inputs, M, doubtful = ctx.saved_tensors
    gradients = _attend_backward([g_y, g_log_s], inputs, M, doubtful)
    return *(None if x is None else g for x, g in zip(inputs, gradients, strict=True)), None


torch.library.register_autograd(_attend, _backward_of_op, setup_context=_save_for_backward)


def _backward(
    all_inputs: Inputs, M: Tensor, doubtful: Tensor, g_y: Tensor, g_log_s: Tensor
) -> Inputs:
    """Return the gradients, given M and what is doubtful from the forward pass."""
    all_gradients = all_inputs.map(torch.empty_like)
    for batch in batches(all_inputs.q):
        inputs = all_inputs.select(batch)
        gradients = all_gradients.select(batch)
        saved = _Saved(M[:, batch], doubtful[:, batch], g_y[batch])
        g_M, lost = grad_of_final_state(inputs, saved.M[-1], g_log_s[batch])
        heads = saved.doubtful.any(0) | lost  # (B, H)
        frames = frames_of(inputs)
        for i, (tokens, chunks) in reversed(list(enumerate(steps(inputs.q)))):
            step = _step(inputs, frames, saved.M[i], tokens, chunks)
            g_M = _step_backward(step, saved, g_M, tokens, inputs.log_f, gradients)
        torch.mul(g_M, saved.M[0], out=gradients.log_s)
        if heads.any():
            _backward_again(inputs, g_y[batch], g_log_s[batch], heads, gradients)
    return all_gradients


class _Saved(NamedTuple):
    """Results of the forward pass, and the gradient of log_y."""

    M: Tensor
    doubtful: Tensor
    g_y: Tensor


def _step_backward(
    step: _Step, saved: _Saved, g: Tensor, tokens: slice, log_f: Tensor | None, gradients: Inputs
) -> Tensor:
    """Write the gradients of some chunks, and return that of M before the first, given that of M
    after the last, `g`.

    For one chunk, `_step` computes

        A = gates.within (e_q e_k^T)        sums = (gates.start e_q) M + A e_v
        M after the chunk = factor (decay M + (gates.end e_k)^T e_v)

    and the derivative of an exponential is itself: hence the last factors of g_q, g_k and g_v.
    """
    frames, gates, e_q, e_k, e_v, from_start, to_end, M, A, sums = step
    g_sums = grad_of_sums(sums, saved, tokens, frames)  # (n, B, H, C, E)
    g_A = gates.weigh(g_sums @ e_v.mT)
    g_q = _add_product(times(g_sums @ M[:-1].mT, gates.start), g_A, e_k).mul_(e_q)
    # Of M before each chunk, through the sums of that chunk: (n, B, H, d_k, E).
    g_read = from_start.mT @ g_sums
    # Of M after each chunk, before `factor` is applied: through all later chunks.
    g_M, g_before = _carry_back(g_read, g, gates.decay, frames.factor)
    # Keys and values count in A and in M after the chunk.
    g_k = _add_product(g_A.mT @ e_q, times(e_v, gates.end), g_M.mT).mul_(e_k)
    g_v = _add_product(A.mT @ g_sums, to_end, g_M).mul_(e_v)[..., :-1]
    write(gradients.q[:, :, tokens], g_q)
    write(gradients.k[:, :, tokens], g_k)
    write(gradients.log_v[:, :, tokens], g_v)
    if log_f is not None and gradients.log_f is not None:
        # The gradient of M[1:]. M after a chunk is M before the next one, or after all.
        g_between = times(g_M, gates.decay)[1:] + g_read[1:]
        g_M_after = torch.cat([g_between, g.unsqueeze(0)])
        g_after = (g_M_after * M[1:]).sum(-1).unsqueeze(3)  # (n, B, H, 1, d_k)
        log_f = frames.split(log_f[:, :, tokens], 0.0)
        write(gradients.log_f[:, :, tokens], log_f_gradient(g_q, g_k, g_after, log_f))
    return g_before


def grad_of_final_state(inputs: Inputs, M: Tensor, g_log_s: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the last M (B, H, d_k, E), and its doubtful heads (B, H)."""
    unused = g_log_s == 0  # these entries need not be certain
    lost = exact.Certificate(inputs).lost_heads(M.masked_fill(unused, 1))
    return torch.where(unused | (M == 0), 0, g_log_s / M), lost


def grad_of_sums(sums: Tensor, saved: _Saved, tokens: slice, frames: Frames) -> Tensor:
    """Return the gradient of sums (n, B, H, C, E): 0 for doubtful and empty sums."""
    g_y = frames.split(saved.g_y[:, :, tokens], 0.0)
    g_sums = torch.cat([g_y, g_y.sum(-1, keepdim=True).neg_()], dim=-1).div_(sums)
    if not sums.amin() >= CERTAIN[sums.dtype]:  # also true if a sum is NaN
        doubtful = saved.doubtful[frames.chunks][..., None, None]
        g_sums.masked_fill_(doubtful | (sums == 0), 0)
    return g_sums


def _backward_again(
    inputs: Inputs, g_y: Tensor, g_log_s: Tensor, heads: Tensor, gradients: Inputs
) -> None:
    """Recompute the gradients of these heads (B, H) in log space."""
    g_y = g_y[heads].double()
    g_log_s = g_log_s[heads].double()
    g_log_S = torch.cat([g_y, -g_y.sum(-1, keepdim=True)], dim=-1)  # (G, T, E)
    recomputed = exact.backward(_in_float64(inputs, heads), g_log_S, g_log_s)
    for gradient, head_gradients in zip(gradients, recomputed, strict=True):
        if gradient is not None and head_gradients is not None:
            gradient[heads] = head_gradients.to(gradient.dtype)


def _carry(M: Tensor, updates: Tensor, decay: Tensor | None, factor: Tensor) -> Tensor:
    """Return M before each of these chunks and after the last, (n + 1, B, H, d_k, E), each in its
    chunk's frame.

    Args:
        M: before the first chunk.
        updates: (n, B, H, d_k, E), the chunks' e_k^T e_v.
        decay: Gates.decay.
        factor: Frames.factor.
    """
    Ms = M.new_empty(len(updates) + 1, *M.shape)
    Ms[0] = M
    for n, update in enumerate(updates):
        torch.add(_decayed(Ms[n], decay, n), update, out=Ms[n + 1])
        if n < len(factor):
            Ms[n + 1].mul_(factor[n])
    return Ms


def _carry_back(
    g_read: Tensor, g: Tensor, decay: Tensor | None, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gradients of M after each chunk (n, B, H, d_k, E), in its own frame, and before the
    first.

    Args:
        g_read: gradient through the chunks' queries.
        g: gradient of the last M that `_carry` returns.
    """
    g_M = torch.empty_like(g_read)
    for n in reversed(range(len(g_read))):
        g_M[n] = g
        if n < len(factor):
            g_M[n].mul_(factor[n])
        g = _decayed(g_M[n], decay, n) + g_read[n]
    return g_M, g


def _decayed(M: Tensor, decay: Tensor | None, n: int) -> Tensor:
    """M times the decay of chunk n."""
    return M if decay is None else M * decay[n]


def _add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x += a @ b, all (n, B, H, ., .)."""
    x.flatten(0, 2).baddbmm_(a.flatten(0, 2), b.flatten(0, 2))
    return x


def write(destination: Tensor, chunks: Tensor) -> None:
    """Copy (N, B, H, C, D) to destination (B, H, T, D)."""
    C = chunks.shape[3]
    N, rest = divmod(destination.shape[2], C)
    split(destination[:, :, : N * C], C, 0.0).copy_(chunks[:N])
    if rest:
        destination[:, :, N * C :].copy_(chunks[N, :, :, :rest])


def step_chunks(x: Tensor) -> int:
    """Return the chunks of x (B, H, T, D) in a step.

    On CPUs they depend only on H and D, so both passes have the same.
    """
    _, H, T, D = x.shape
    if x.device.type != "cpu":
        return ceil_div(T, CHUNK)
    return max(1, STEP // (H * CHUNK * D))


def batches(x: Tensor) -> Iterator[slice]:
    """Yield elements of the batch, as many at a time as fit into a step."""
    B = len(x)
    size = B
    if x.device.type == "cpu":
        size = max(1, step_chunks(x) // ceil_div(x.shape[2], CHUNK))
    for start in range(0, B, size):
        yield slice(start, min(start + size, B))


def steps(x: Tensor) -> list[tuple[slice, slice]]:
    """Return the tokens and the chunks of each step of x (B, H, T, D)."""
    T = x.shape[2]
    N = ceil_div(T, CHUNK)
    size = step_chunks(x)
    slices = []
    for first in range(0, N, size):
        stop = first + size
        tokens = slice(CHUNK * first, min(CHUNK * stop, T))
        slices.append((tokens, slice(first, min(stop, N))))
    return slices
