"""Linear attention (Katharopoulos et al. 2020), whose weights are products of positive features, in linear time.

There are masked scores within a chunk of tokens, and a state between chunks. Memory is linear too: there are T x C
scores for chunks of C tokens, and a state of d x d_v for every chunk. Autograd computes the gradients.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import elu, pad

from model.ops.custom import accumulation_dtype, running_sum
from model.ops.gates import NO_GATES, check_gates, forgotten, gates_of, times
from model.ops.log_attention.chunks import CHUNK


class LinearAttentionState(NamedTuple):
    """The sums of the paper's eqs. 10 and 11 over all tokens so far. Their size is constant."""

    S: Tensor
    """(B, H, d, d_v): sum_j phi(k_j) v_j^T, float32 or float64."""
    z: Tensor
    """(B, H, d): sum_j phi(k_j), float32 or float64."""


def naive_linear_attention(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None = None) -> Tensor:
    """Katharopoulos et al. 2020 (arXiv 2006.16236), eqs. 7 and 8, literally: the definition, with T x T weights.

        y_i = sum_{j <= i} phi(q_i)^T phi(k_j) v_j / sum_{j <= i} phi(q_i)^T phi(k_j),    phi(x) = elu(x) + 1

    Shapes and result are those of `linear_attention`. With gates, a pair's weight is multiplied by what is kept.
    """
    weights = ((elu(q) + 1) @ (elu(k) + 1).mT).tril()  # (B, H, T, T)
    if log_f is not None:
        weights = weights * forgotten(log_f).squeeze(-1).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearAttentionState | None = None,
    log_f: Tensor | None = None,
) -> tuple[Tensor, LinearAttentionState]:
    """Causal attention with similarity phi(q)^T phi(k), phi(x) = elu(x) + 1.

        y_i = phi(q_i)^T S_i / phi(q_i)^T z_i    (Katharopoulos et al. 2020, eqs. 9 to 12)

    Args:
        q: (B, H, T, d).
        k: (B, H, T, d).
        v: (B, H, T, d_v).
        state: the state after earlier tokens, which is not changed; None before the first.
        log_f: (B, H, T, 1), logarithms of what is kept of earlier tokens: see `log_attention`.

    Returns:
        y (B, H, T, d_v) in the type of v, and the state after these tokens. Sums are kept in float32, or float64 for
        float64. If weights underflow even there, with all features of the keys below about -40, y goes to 0.

    Raises:
        ValueError: shapes do not match, or a gate is above 0 or NaN (as for `log_attention`).
    """
    if not (
        q.dim() == v.dim() == 4
        and q.shape == k.shape
        and q.shape[:3] == v.shape[:3]
        and q.numel()
        and v.numel()
    ):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(
            f"{shapes} do not match (B, H, T, d), (B, H, T, d), (B, H, T, d_v), each at least 1"
        )
    dtype = accumulation_dtype(q)
    if log_f is not None:
        check_gates(log_f, q)
    with torch.autocast(q.device.type, enabled=False):
        f_q, f_k = _features(q.to(dtype)), _features(k.to(dtype))
        if state is None:
            z = torch.zeros_like(f_k[:, :, 0])  # (B, H, d)
            state = LinearAttentionState(z.new_zeros(*z.shape, v.shape[-1]), z)
        log_f = None if log_f is None else log_f.to(dtype)
        attend = _step if q.shape[2] == 1 else _chunks
        sums, norms, state = attend(f_q, f_k, v.to(dtype), state, log_f)
        # Avoid 0 / 0. The square root keeps gradients, which divide by the norm, within the range of the type.
        y = sums / norms.clamp(min=torch.finfo(dtype).tiny ** 0.5)
    return y.to(v.dtype), state


def _features(x: Tensor) -> Tensor:
    """elu(x) + 1 with full relative precision: in float32, exp(-20) - 1 + 1 would be 0."""
    return (
        x.relu() + x.where(x <= 0, 0).exp()
    )  # the gradient of clamp at its bound differs between versions of torch


def _step(
    f_q: Tensor, f_k: Tensor, v: Tensor, state: LinearAttentionState, log_f: Tensor | None
) -> tuple[Tensor, Tensor, LinearAttentionState]:
    """One token as a step of a recurrent network (eqs. 18 to 20): f_q, f_k (B, H, 1, d), v (B, H, 1, d_v)."""
    kept = None if log_f is None else log_f[:, :, 0].exp()  # (B, H, 1)
    S = times(state.S, None if kept is None else kept.unsqueeze(-1)) + f_k.mT * v
    z = times(state.z, kept) + f_k[:, :, 0]
    return f_q @ S, f_q @ z.unsqueeze(-1), LinearAttentionState(S, z)


def _chunks(
    f_q: Tensor, f_k: Tensor, v: Tensor, state: LinearAttentionState, log_f: Tensor | None
) -> tuple[Tensor, Tensor, LinearAttentionState]:
    """Return numerators (B, H, T, d_v), denominators (B, H, T, 1), and the state after the T tokens."""
    T = f_q.shape[2]
    C = min(CHUNK, T)
    tensors = (f_q, f_k, v, f_q[..., :0] if log_f is None else log_f)
    q, k, v, f = (
        pad(x, (0, 0, 0, -T % C)).unflatten(2, (-1, C)) for x in tensors
    )  # (B, H, N, C, .), zeros at the end
    gates = NO_GATES if log_f is None else gates_of(f)
    to_end = times(k, gates.end)
    S = torch.cat([state.S.unsqueeze(2), to_end.mT @ v], dim=2)  # (B, H, N + 1, d, d_v)
    z = torch.cat([state.z.unsqueeze(2), to_end.sum(3)], dim=2).unsqueeze(-1)  # (B, H, N + 1, d, 1)
    S, z = (
        running_sum(x, 2) if gates.kept is None else _decayed_sums(x, gates.kept) for x in (S, z)
    )
    A = (q @ k.mT).tril() if gates.within is None else (q @ k.mT) * gates.within  # (B, H, N, C, C)
    from_start = times(q, gates.start)
    sums = from_start @ S[:, :, :-1] + A @ v  # (B, H, N, C, d_v)
    norms = from_start @ z[:, :, :-1] + A.sum(-1, keepdim=True)  # (B, H, N, C, 1)
    last = LinearAttentionState(
        S[:, :, -1].clone(), z[:, :, -1, :, 0].clone()
    )  # views would keep all chunks' states
    return sums.flatten(2, 3)[:, :, :T], norms.flatten(2, 3)[:, :, :T], last


def _decayed_sums(x: Tensor, kept: Tensor) -> Tensor:
    """The sum before each chunk and after the last, given the first and each chunk's update: (B, H, N + 1, d, .)."""
    sums = [x[:, :, 0]]
    for n in range(x.shape[2] - 1):
        sums.append(sums[-1] * kept[:, :, n] + x[:, :, n + 1])
    return torch.stack(sums, 2)
