"""Log attention in chunks, by matrix products, with memory linear in length.

For a chunk of C tokens, and the state M (d_k, E) of all tokens before it,

    A = within (e_q e_k^T)                  (C, C)
    sums = (start e_q) M + A e_v            (C, E)
    M after = decay M + (end e_k)^T e_v     (d_k, E)

e_v has a last column of ones, so E = d_v + 1, and the last sum is the norm of the others. `_Gates`
explains within, start, end and decay. The forward pass computes some chunks at a time, and saves
only the state before each such step. The backward pass computes them again, from the last step to
the first, and carries the gradient of M. The derivative ignores the bounds of logarithms, so it
needs e_q, e_k and e_v alone.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from common.numbers import ceil_div
from model.ops.custom import (
    CHUNK,
    operator,
    refuse_second_order,
    refuse_transforms,
    running_sum,
)
from model.ops.log_attention.naive_attention import KEY, QUERY, VALUE, Form, Inputs, empty_state

NAMES = "log_attention", "backend='naive'"  # the operator, and the form that has all derivatives
# Elements of a temporary on a CPU, so that a step fits into its cache. Other devices process all
# chunks at once.
STEP = 2**17
RESET = -1000.0  # exp(RESET) is exactly 0, and sums of RESET are finite
EMPTY = 1e-24  # a query with a smaller norm sees only masked or forgotten keys: no gradient


def chunked_log_attention(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None,
    *,
    form: Form,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Causal `log_attention`, and the state after it."""
    refuse_transforms(*NAMES, q, k, log_v, log_f, state)
    y, after, _ = _attend(q, k, log_v, log_f, state, *form)
    return y, after


def log_attention_step(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None,
    *,
    form: Form,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """`log_attention` of a single token, causal and without gradients."""
    dtype = log_v.dtype
    with torch.autocast(q.device.type, enabled=False):
        q, k, log_v = (x.to(state.dtype, copy=True) for x in (q, k, log_v))
        e_q, e_k = _features(q, k, form)
        e_v = pad(_values(log_v, form), (0, 1), value=1.0)
        if log_f is not None:
            state = state * log_f.to(state.dtype).exp()
        state = torch.addcmul(state, e_k.mT, e_v)
        return _results(e_q @ state, form).to(dtype), state


@operator("log_attention")
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor | None,
    state: Tensor,
    exp: bool,
    log: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (B, H, T, d_v), the state after the tokens (B, H, d_k, E), and, for the backward
    pass, the state before each step (steps, B, H, d_k, E)."""
    form = Form(exp, log)
    y, after, before = _empty_results(q, k, v, log_f, state)
    with torch.autocast(q.device.type, enabled=False):
        for tokens in _steps(q):
            M = after[tokens.batch] if tokens.start else state[tokens.batch]
            before[tokens.number, tokens.batch] = M
            step = _step(tokens.chunks_of(Inputs(q, k, v, log_f), state.dtype, form), M, form)
            tokens.write(_results(step.sums, form), y)
            after[tokens.batch] = step.M[-1]
    return y, after, before


def _empty_results(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None, state: Tensor, *_: bool
) -> tuple[Tensor, Tensor, Tensor]:
    steps = ceil_div(q.shape[2], CHUNK * _chunks_in_step(q))
    return torch.empty_like(v), torch.empty_like(state), state.new_empty(steps, *state.shape)


@operator("log_attention_backward")
def _attend_backward(
    g_y: Tensor,
    g_after: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor | None,
    before: Tensor,
    exp: bool,
    log: bool,
) -> list[Tensor]:
    """Return the gradients of q, k, v, log_f (empty without gates) and the state."""
    form = Form(exp, log)
    inputs = Inputs(q, k, v, log_f)
    *gradients, g_M = _empty_gradients(g_y, g_after, *inputs)
    g_M.copy_(g_after)
    with torch.autocast(g_y.device.type, enabled=False):
        for tokens in reversed(list(_steps(q))):
            chunks = tokens.chunks_of(inputs, g_M.dtype, form)
            step = _step(chunks, before[tokens.number, tokens.batch], form)
            g = tokens.chunks(g_y, g_M.dtype, 0.0)
            found, g_M[tokens.batch] = _step_backward(
                step, chunks.log_f, g, g_M[tokens.batch], form
            )
            for gradient, part in zip(gradients, found, strict=True):
                if part is not None:
                    tokens.write(part, gradient)
    return [*gradients, g_M]


def _empty_gradients(
    g_y: Tensor, g_after: Tensor, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None, *_: Any
) -> list[Tensor]:
    """Allocate gradients. An empty tensor stands for None, which an operator cannot return."""
    g_f = q.new_empty(0) if log_f is None else torch.empty_like(log_f)
    like = torch.empty_like
    return [like(q), like(k), like(v), g_f, like(g_after)]


def register_backward(attend: Any, attend_backward: Any) -> None:
    """Give an operator its gradients.

    Args:
        attend: (q, k, v, log_f, state, exp, log) -> y, the state after the tokens, and tensors
        attend_backward: (g_y, g_after, q, k, v, log_f, *saved, exp, log) -> gradients of q, k, v,
            log_f and the state.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, _, exp, log = inputs
        ctx.form = exp, log
        ctx.save_for_backward(*tensors, *output[2:])
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)  # or torch would make zeros for what is saved

    def backward(
        ctx: Any, g_y: Tensor | None, g_after: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_order(*NAMES)
        q, _, v, log_f, *_ = saved = ctx.saved_tensors
        g_y = torch.zeros_like(v) if g_y is None else g_y
        g_after = empty_state(q, v) if g_after is None else g_after
        gradients = attend_backward(g_y, g_after, *saved, *ctx.form)
        if log_f is None:
            gradients[3] = None
        return *gradients, None, None

    torch.library.register_autograd(attend, backward, setup_context=save)


torch.library.register_fake(_attend, _empty_results)
torch.library.register_fake(_attend_backward, _empty_gradients)
register_backward(_attend, _attend_backward)


class _Gates(NamedTuple):
    """What gates keep, for n chunks. Let a_t be the sum of log_f over a chunk's tokens up to t.

    Without gates all are None, which stands for 1, and `within` for the causal mask.
    """

    within: Tensor | None = None
    """(n, B, H, C, C): exp(a_t - a_j) of key j for query t; 0 for later keys."""
    start: Tensor | None = None
    """(n, B, H, C, 1): exp(a_t) of the state before the chunk for query t."""
    end: Tensor | None = None
    """(n, B, H, C, 1): exp(a_C - a_j) of key j for the state after the chunk."""
    decay: Tensor | None = None
    """(n, B, H, 1, 1): exp(a_C) of the state before the chunk for the state after it."""

    def apply_to(self, scores: Tensor) -> Tensor:
        """Multiply scores (n, B, H, C, C) by `within`, in place."""
        return scores.tril_() if self.within is None else scores.mul_(self.within)

    def add_decayed(self, x: Tensor, M: Tensor, n: int) -> None:
        """x += M times the decay of chunk n."""
        x.add_(M) if self.decay is None else x.addcmul_(M, self.decay[n])


def _gates(log_f: Tensor | None) -> _Gates:
    """Return the factors of gates (n, B, H, C, 1)."""
    if log_f is None:
        return _Gates()
    a = running_sum(log_f.double().clamp(min=RESET), -2)  # float32 would round small gates away
    last = a[..., -1:, :]
    # The first is infinite above the diagonal, before tril_.
    within, start, end, decay = (x.to(log_f.dtype).exp() for x in (a - a.mT, a, last - a, last))
    return _Gates(within.tril_(), start, end, decay)


def _scale(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


class _Step(NamedTuple):
    """What both passes compute of n chunks."""

    gates: _Gates
    e_q: Tensor
    """(n, B, H, C, d_k)."""
    e_k: Tensor
    """(n, B, H, C, d_k)."""
    e_v: Tensor
    """(n, B, H, C, E)."""
    to_end: Tensor
    """(n, B, H, C, d_k): end e_k."""
    M: Tensor
    """(n + 1, B, H, d_k, E): before each chunk and after the last."""
    A: Tensor
    """(n, B, H, C, C)."""
    sums: Tensor
    """(n, B, H, C, E)."""


def _step(chunks: Inputs, M: Tensor, form: Form) -> _Step:
    """Compute chunks of q, k, v and log_f (n, B, H, C, D), given the state before the first.

    e_q, e_k and e_v take the memory of the chunks.
    """
    q, k, v, log_f = chunks
    gates = _gates(log_f)
    e_q, e_k = _features(q, k, form)
    e_v = _values(v, form)
    to_end = _scale(e_k, gates.end)
    Ms = torch.cat([M.unsqueeze(0), to_end.mT @ e_v])
    for n in range(len(q)):
        gates.add_decayed(Ms[n + 1], Ms[n], n)
    A = gates.apply_to(e_q @ e_k.mT)
    sums = _add_product(_scale(e_q, gates.start) @ Ms[:-1], A, e_v)
    return _Step(gates, e_q, e_k, e_v, to_end, Ms, A, sums)


def _step_backward(
    step: _Step, log_f: Tensor | None, g_y: Tensor, g_M: Tensor, form: Form
) -> tuple[Inputs, Tensor]:
    """Return the gradients of the chunks' q, k, v and log_f, and of M before the first, given those
    of y and of M after the last.

    Gates multiply a factor of each product, not its result: after a reset, g_sums M^T may be
    infinite.
    """
    gates, e_q, e_k, e_v, to_end, M, A, sums = step
    g_sums = _grad_of_sums(g_y, sums, form)
    g_A = gates.apply_to(g_sums @ e_v.mT)
    g_read = _scale(g_sums, gates.start)
    g_e_q = _add_product(g_read @ M[:-1].mT, g_A, e_k)
    g_Ms = torch.cat([e_q.mT @ g_read, g_M.unsqueeze(0)])  # before each chunk and after the last
    for n in reversed(range(len(e_q))):
        gates.add_decayed(g_Ms[n], g_Ms[n + 1], n)
    g_e_k = _add_product(_scale(e_v, gates.end) @ g_Ms[1:].mT, g_A.mT, e_q)
    g_v = _add_product(to_end @ g_Ms[1:], A.mT, g_sums)
    g_f = None
    if log_f is not None:
        g_f = _grad_of_gates(step, g_e_q, g_e_k, g_Ms[1:]).masked_fill_(log_f <= RESET, 0)
    g_q = g_e_q.mul_(e_q if form.exp else e_q.clamp(max=1))
    g_k = g_e_k.mul_(e_k if form.exp else e_k.clamp(max=1))
    if form.log:
        g_v.mul_(e_v)
    return Inputs(g_q, g_k, g_v[..., :-1], g_f), g_Ms[0]


def _grad_of_gates(step: _Step, g_e_q: Tensor, g_e_k: Tensor, g_M: Tensor) -> Tensor:
    """Return the gradient of gates, given those of e_q, e_k and of M after each chunk.

    A gate scales what passes from tokens before it to queries after it and to the state. That is
    all that queries from the gate on read, and all that the state gets, less all that keys from the
    gate on give.
    """
    read = torch.linalg.vecdot(g_e_q, step.e_q)  # (n, B, H, C)
    given = torch.linalg.vecdot(g_e_k, step.e_k)
    to_state = torch.linalg.vecdot(step.M[1:].flatten(-2), g_M.flatten(-2)).unsqueeze(-1)
    g_f = running_sum((read - given).flip(-1), -1).flip(-1).add_(to_state)
    return g_f.unsqueeze(-1)


def _features(q: Tensor, k: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return e_q and e_k in the memory of q and k."""
    if form.exp:
        q.sub_(q.amax(-1, keepdim=True)).clamp_(*QUERY).exp_()
        return q, _exp_or_zero(k)
    return _elu_plus_1(q), _elu_plus_1(k)


def _elu_plus_1(x: Tensor) -> Tensor:
    return _exp_or_zero(x.clamp(max=0)).add_(x.relu_())


def _exp_or_zero(x: Tensor) -> Tensor:
    """exp of bounded keys, in place; 0 for -inf."""
    # A minimum is 8 x as fast as a mask. On a GPU, reading it would synchronize.
    if not _synchronizes(x) and bool(x.amin() > -torch.inf):
        return x.clamp_(*KEY).exp_()
    is_masked = x == -torch.inf
    return x.clamp_(*KEY).exp_().masked_fill_(is_masked, 0)


def _synchronizes(x: Tensor) -> bool:
    """Whether reading a number of x would wait for a GPU, or break a graph that is compiled."""
    return x.device.type != "cpu" or torch.compiler.is_compiling()


def _values(v: Tensor, form: Form) -> Tensor:
    """Return e_v in the memory of v."""
    return v.clamp_(*VALUE).exp_() if form.log else v


def _results(sums: Tensor, form: Form) -> Tensor:
    """(..., E) -> y (..., d_v)."""
    y = sums[..., :-1] / sums[..., -1:]
    return y.log_() if form.log else y


def _grad_of_sums(g_y: Tensor, sums: Tensor, form: Form) -> Tensor:
    """Return the gradient of sums (..., E), given that of `_results`; 0 where no key is seen."""
    values = sums[..., :-1]
    norm = sums[..., -1:]
    g = torch.empty_like(sums)
    torch.div(g_y, values if form.log else norm, out=g[..., :-1])
    g_norm = g_y if form.log else g[..., :-1] * values
    torch.sum(g_norm, -1, keepdim=True, out=g[..., -1:]).div_(norm).neg_()
    if not _synchronizes(g) and bool(norm.amin() >= EMPTY):
        return g
    return g.masked_fill_(norm < EMPTY, 0)


def _add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x += a @ b, all (n, B, H, ., .)."""
    x.flatten(0, 2).baddbmm_(a.flatten(0, 2), b.flatten(0, 2))
    return x


class _Tokens(NamedTuple):
    """The tokens of a step: some of a sequence, of some elements of the batch."""

    batch: slice
    number: int
    """Of the step within the sequence."""
    start: int
    stop: int

    def select(self, x: Tensor) -> Tensor:
        return x[self.batch, :, self.start : self.stop]

    def chunks(self, x: Tensor, dtype: torch.dtype, fill: float, columns: int = 0) -> Tensor:
        """Copy x (B, H, T, D) to (n, B, H, C, D + columns), with `fill` for tokens and columns that
        x lacks."""
        x = self.select(x)
        B, H, T, D = x.shape
        C = min(CHUNK, T)
        n = ceil_div(T, C)
        chunks = x.new_empty(n, B, H, C, D + columns, dtype=dtype)
        chunks[..., D:] = fill
        chunks[-1, :, :, T - (n - 1) * C :] = fill
        for part, tokens in _parts(chunks[..., :D], x):
            part.copy_(tokens)
        return chunks

    def chunks_of(self, x: Inputs, dtype: torch.dtype, form: Form) -> Inputs:
        """Copy the inputs. v gets the column whose e_v is 1."""
        return Inputs(
            self.chunks(x.q, dtype, 0.0),
            self.chunks(x.k, dtype, -torch.inf),
            self.chunks(x.v, dtype, 0.0 if form.log else 1.0, columns=1),
            None if x.log_f is None else self.chunks(x.log_f, dtype, 0.0),
        )

    def write(self, chunks: Tensor, x: Tensor) -> None:
        """Copy chunks (n, B, H, C, D) to x (B, H, T, D)."""
        for part, tokens in _parts(chunks, self.select(x)):
            tokens.copy_(part)


def _parts(chunks: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of the same tokens of chunks (n, B, H, C, D) and of x (B, H, T, D): of whole
    chunks, and of the rest."""
    T = x.shape[2]
    C = chunks.shape[3]
    n, rest = divmod(T, C)
    yield chunks[:n], x[:, :, : n * C].unflatten(2, (n, C)).permute(2, 0, 1, 3, 4)
    if rest:
        yield chunks[n, :, :, :rest], x[:, :, n * C :]


def _steps(x: Tensor) -> Iterator[_Tokens]:
    """Yield all tokens of x (B, H, T, D): long sequences in steps, and short ones together."""
    B, _, T, _ = x.shape
    size = CHUNK * _chunks_in_step(x)
    rows = max(1, size // T)
    for first in range(0, B, rows):
        for number, start in enumerate(range(0, T, size)):
            yield _Tokens(slice(first, first + rows), number, start, min(start + size, T))


def _chunks_in_step(x: Tensor) -> int:
    B, H, T, D = x.shape
    if x.device.type != "cpu":
        return B * ceil_div(T, CHUNK)
    return max(1, STEP // (H * CHUNK * D))
