"""The definition of log attention: short, with all T x S weights in memory.

All other implementations must agree with it. A query's weights are products of positive features,
times what gates keep of a key:

    y_t = sum_j w_tj e_v[j] / sum_j w_tj
    w_tj = <e_q[t], e_k[j]> exp(log_f[j + 1] + ... + log_f[t])

With one more column of values, equal to 1, both sums are one product.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.ops.custom import accumulation_dtype
from model.ops.gates import sum_gates

# Bounds of logarithms, so that float32 and bfloat16 hold every number: docs/attention.md.
QUERY = -60.0, 0.0  # relative to a query's largest feature
KEY = -25.0, 45.0
VALUE = -20.0, 25.0


class Inputs(NamedTuple):
    """The operator's inputs, or what a form has in their place: chunks, gradients, pointers."""

    q: Any
    k: Any
    v: Any
    log_f: Any
    """None without gates."""


class Form(NamedTuple):
    """What features and values are."""

    exp: bool
    """Whether features are exp(x); otherwise they are elu(x) + 1."""
    log: bool
    """Whether values and results are logarithms."""


LOG_SPACE = Form(exp=True, log=True)
"""Heinsen 2024 (arXiv 2404.05843), eqs. 4-6."""
SIGNED = Form(exp=True, log=False)
"""The same weights for values of either sign."""
LINEAR = Form(exp=False, log=False)
"""Katharopoulos et al. 2020 (arXiv 2006.16236), eqs. 7 and 8."""


def naive_log_attention(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor | None = None,
    *,
    form: Form = LOG_SPACE,
    causal: bool = True,
    state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Arguments and result are those of `log_attention`, outside of autocast."""
    # Features, values with one more column of ones, and weights of all pairs.
    dtype = accumulation_dtype(q)
    e_q, e_k = _features(q.to(dtype), k.to(dtype), form)
    e_v = _bounded(log_v.to(dtype), *VALUE).exp() if form.log else log_v.to(dtype)
    e_v = pad(e_v, (0, 1), value=1.0)  # (B, H, S, d_v + 1)
    weights = e_q @ e_k.mT  # (B, H, T, S)
    start: Any = 1.0
    end: Any = 1.0
    decay: Any = 1.0
    if causal:
        weights = weights.tril()
    # What gates keep of keys and of the state.
    if log_f is not None:
        log_f = log_f.to(dtype)
        kept = sum_gates(log_f).squeeze(-1).exp()  # (B, H, T, T)
        weights = weights * kept
        start = log_f.cumsum(2).exp()  # (B, H, T, 1): of the state before these tokens
        end = kept[:, :, -1:].mT  # (B, H, T, 1): of a key after these tokens
        decay = start[:, :, -1:]
    # Sums over these tokens and the state; the last column is the norm.
    state = empty_state(q, log_v) if state is None else state.to(dtype)
    sums = weights @ e_v + (start * e_q) @ state  # (B, H, T, d_v + 1)
    y = sums[..., :-1] / sums[..., -1:]
    y = (y.log() if form.log else y).to(log_v.dtype)
    return (y, decay * state + (end * e_k).mT @ e_v) if return_state else y


def empty_state(q: Tensor, v: Tensor) -> Tensor:
    """Return the state before the first token, for queries (B, H, T, d_k) and values (B, H, S,
    d_v): zeros (B, H, d_k, d_v + 1)."""
    B, H, _, d_k = q.shape
    return q.new_zeros(B, H, d_k, v.shape[-1] + 1, dtype=accumulation_dtype(q))


def _features(q: Tensor, k: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    if form.exp:
        q = q - q.detach().amax(-1, keepdim=True)
        return _bounded(q, *QUERY).exp(), _bounded_or_masked(k).exp()
    return _elu_plus_1(q), _elu_plus_1(k)


def _elu_plus_1(x: Tensor) -> Tensor:
    return x.relu() + _bounded_or_masked(x.where(x <= 0, 0)).exp()


def _bounded_or_masked(x: Tensor) -> Tensor:
    """Bound logarithms of features, and keep -inf, which masks."""
    return torch.where(x == -torch.inf, x, _bounded(x, *KEY))


def _bounded(x: Tensor, lowest: float, highest: float) -> Tensor:
    """Clamp x; the derivative ignores the bounds. It is 0 at infinity."""
    x = x.nan_to_num(nan=torch.nan)
    return x.clamp(lowest, highest).detach() + (x - x.detach())
