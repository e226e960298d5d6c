"""Forgetting inside a chunk, as factors of at most 1.

Let a_t be the sum of a head's log_f over a chunk's tokens up to t. The term of key j has the factor
exp(a_t - a_j) for query t, and the state before the chunk has exp(a_t). Sums start again in each
chunk, so rounding does not grow with length. log_f = -inf is a reset: it is not added, but a mask
separates the tokens before it from those after it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model.ops.custom import running_sum

HEAD_REACH = {torch.float32: 1e8, torch.float64: 500.0}
"""The most that a head may forget in a chunk: beyond, log_attention/exact.py computes it again."""
_REACH = {torch.float32: 40.0, torch.float64: 500.0}
"""The same for factors that are products exp(a_t) exp(-a_j)."""


class Gates(NamedTuple):
    """Factors for n chunks. None is 1, except that `within` is then the causal mask."""

    within: Tensor | None
    """(n, B, H, C, C): for scores of queries t and keys j."""
    start: Tensor | None
    """(n, B, H, C, 1): for what a query reads from the state before the chunk."""
    end: Tensor | None
    """(n, B, H, C, 1): for what a key adds to the state after the chunk."""
    decay: Tensor | None
    """(n, B, H, 1, 1): what the state after the chunk keeps of the state before it."""

    def weigh(self, scores: Tensor) -> Tensor:
        """Multiply scores (n, B, H, C, C) by `within`, in place."""
        return scores.tril_() if self.within is None else scores.mul_(self.within)


NO_GATES = Gates(None, None, None, None)


def check_gates(log_f: Tensor, q: Tensor) -> None:
    """Raise ValueError if gates do not fit queries q (B, H, T, d), or, on a CPU, are above 0."""
    shape = (*q.shape[:3], 1)
    if log_f.shape != shape:
        raise ValueError(f"log_f {tuple(log_f.shape)} must be {shape}, one gate for a head's token")
    if log_f.device.type != "cpu" or torch.compiler.is_compiling():
        return
    highest = float(log_f.detach().amax())
    if highest > 0:  # NaN passes: training reports the step at which the loss becomes NaN
        raise ValueError(f"log_f has a maximum of {highest}: gates must be between -inf and 0")


def gates_of(log_f: Tensor) -> Gates:
    """Return the factors of gates log_f (n, B, H, C, 1), in the accumulation type."""
    dtype = log_f.dtype
    reset = resets_of(log_f)
    a = running_sum(without(log_f, reset).double(), -2)  # float32 would round small gates away
    last = a[..., -1:, :]
    start = a.exp().to(dtype)
    end = (last - a).exp().to(dtype)
    decay = last.exp().to(dtype)
    if log_f.device.type == "cpu" and last.amin() > -_REACH[dtype]:
        within = start * (-a).exp().to(dtype).mT  # faster than exponentials of differences
    else:
        # tril before exp, which would be infinite above the diagonal.
        within = (a - a.mT).tril().to(dtype).exp()
    if reset is not None:
        n_resets = reset.cumsum(-2)  # up to each token
        n_last = n_resets[..., -1:, :]
        within = within * (n_resets == n_resets.mT)
        start = start * (n_resets == 0)
        end = end * (n_resets == n_last)
        decay = decay * (n_last == 0)
    return Gates(within.tril(), start, end, decay)


def resets_of(log_f: Tensor) -> Tensor | None:
    """Return the tokens of gates (..., 1) that are resets, bool, or None if a CPU finds none."""
    # The minimum takes a tenth of the time of comparing each. On a GPU, asking would wait.
    if log_f.device.type == "cpu" and bool(log_f.amin() > -torch.inf):
        return None
    return log_f == -torch.inf


def without(log_f: Tensor, reset: Tensor | None) -> Tensor:
    """Return gates with 0 at the resets."""
    return log_f if reset is None else log_f.masked_fill(reset, 0)


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    """x times a factor; None means 1."""
    return x if factor is None else x * factor


def log_f_gradient(g_q: Tensor, g_k: Tensor, g_after: Tensor, log_f: Tensor) -> Tensor:
    """Return the gradient of log_f (n, B, H, C, 1), given the gradients of q and k (n, B, H, C,
    d_k).

    A gate scales what later queries and the state after the chunk get from the keys before the
    gate. So its gradient is the sum of g_q - g_k over features and over the tokens from the gate to
    the chunk's end, plus the sum of g_after.

    Args:
        g_after: (n, B, H, 1, d_k), the sum over value columns of the state after each chunk times
            its gradient.
    """
    g = (g_q - g_k).sum(-1, keepdim=True)
    g = running_sum(g.flip(-2), -2).flip(-2).add_(g_after.sum(-1, keepdim=True))
    return without(g, resets_of(log_f))


def forgotten(log_f: Tensor) -> Tensor:
    """Sum of log_f (B, H, T, 1) over the tokens after j up to t, for every pair: (B, H, T, T, 1), 0
    for j >= t."""
    T = log_f.shape[2]
    is_later = log_f.new_ones(T, T, dtype=torch.bool).tril(-1)  # gate i counts for keys j < i
    return log_f.unsqueeze(3).where(is_later.unsqueeze(-1), 0).cumsum(2)
