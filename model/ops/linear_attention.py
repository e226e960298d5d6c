"""Linear attention (Katharopoulos et al. 2020), whose weights are products of positive features, in
linear time.

There are masked scores within a chunk of tokens, and a state between chunks. Memory is linear too:
there are T x C scores for chunks of C tokens, and a state of d x d_v for every chunk. Autograd
computes the gradients.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import elu

from model.ops.custom import CHUNK, accumulation_dtype, in_chunks, running_sum
from model.ops.gates import NO_GATES, check_gates, forgotten, gates_of, times


class LinearAttentionState(NamedTuple):
    """The sums of the paper's eqs. 10 and 11 over all tokens so far. Their size is constant."""

    S: Tensor
    """(B, H, d, d_v): sum_j phi(k_j) v_j^T, float32 or float64."""
    z: Tensor
    """(B, H, d): sum_j phi(k_j), float32 or float64."""


def naive_linear_attention(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None = None) -> Tensor:
    """Katharopoulos et al. 2020 (arXiv 2006.16236), eqs. 7 and 8, literally: the definition, with T
    x T weights.

        y_i = sum_{j <= i} phi(q_i)^T phi(k_j) v_j / sum_{j <= i} phi(q_i)^T phi(k_j)
        phi(x) = elu(x) + 1

    Shapes and result are those of `linear_attention`. With gates, a pair's weight is multiplied by
    what is kept.
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
        y (B, H, T, d_v) in the type of v, and the state after these tokens. Sums are kept in
        float32, or float64 for float64. If weights underflow even there, with all features of the
        keys below about -40, y goes to 0.

    Raises:
        ValueError: shapes do not match, or a gate is above 0 (checked on CPUs).
    """
    fits = q.dim() == v.dim() == 4 and q.shape == k.shape and q.shape[:3] == v.shape[:3]
    if not fits or q.numel() == 0 or v.numel() == 0:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(
            f"{shapes} do not match (B, H, T, d), (B, H, T, d), (B, H, T, d_v), each at least 1"
        )
    dtype = accumulation_dtype(q)
    if log_f is not None:
        check_gates(log_f, q)
    with torch.autocast(q.device.type, enabled=False):
        f_q = _features(q.to(dtype))
        f_k = _features(k.to(dtype))
        if state is None:
            z = torch.zeros_like(f_k[:, :, 0])  # (B, H, d)
            state = LinearAttentionState(z.new_zeros(*z.shape, v.shape[-1]), z)
        if log_f is not None:
            log_f = log_f.to(dtype)
        attend = _step if q.shape[2] == 1 else _chunks
        sums, norms, state = attend(f_q, f_k, v.to(dtype), state, log_f)
        # Avoid 0 / 0. The square root keeps gradients, which divide by the norm, within the range
        # of the type.
        y = sums / norms.clamp(min=torch.finfo(dtype).tiny ** 0.5)
    return y.to(v.dtype), state


def _features(x: Tensor) -> Tensor:
    """elu(x) + 1 with full relative precision: in float32, exp(-20) - 1 + 1 would be 0."""
    # Not by clamp: its gradient at the bound differs between versions of torch.
    return x.relu() + x.where(x <= 0, 0).exp()


def _step(
    f_q: Tensor, f_k: Tensor, v: Tensor, state: LinearAttentionState, log_f: Tensor | None
) -> tuple[Tensor, Tensor, LinearAttentionState]:
    """One token as a step of a recurrent network (eqs. 18 to 20): f_q, f_k (B, H, 1, d), v (B, H,
    1, d_v)."""
    S, z = state
    if log_f is not None:
        decay = log_f[:, :, 0].exp()  # (B, H, 1)
        S = S * decay.unsqueeze(-1)
        z = z * decay
    S = S + f_k.mT * v
    z = z + f_k[:, :, 0]
    return f_q @ S, f_q @ z.unsqueeze(-1), LinearAttentionState(S, z)


def _chunks(
    f_q: Tensor, f_k: Tensor, v: Tensor, state: LinearAttentionState, log_f: Tensor | None
) -> tuple[Tensor, Tensor, LinearAttentionState]:
    """Return numerators (B, H, T, d_v), denominators (B, H, T, 1), and the state."""
    T = f_q.shape[2]
    C = min(CHUNK, T)
    q = in_chunks(f_q, C, 0.0)  # (B, H, N, C, d)
    k = in_chunks(f_k, C, 0.0)
    v = in_chunks(v, C, 0.0)
    gates = NO_GATES
    if log_f is not None:
        gates = gates_of(in_chunks(log_f, C, 0.0))
    to_end = times(k, gates.end)
    S = torch.cat([state.S.unsqueeze(2), to_end.mT @ v], dim=2)  # (B, H, N + 1, d, d_v)
    z = torch.cat([state.z.unsqueeze(2), to_end.sum(3)], dim=2).unsqueeze(-1)  # (B, H, N + 1, d, 1)
    S = _sums(S, gates.decay)
    z = _sums(z, gates.decay)
    A = q @ k.mT  # (B, H, N, C, C)
    A = A.tril() if gates.within is None else A * gates.within
    from_start = times(q, gates.start)
    sums = from_start @ S[:, :, :-1] + A @ v  # (B, H, N, C, d_v)
    norms = from_start @ z[:, :, :-1] + A.sum(-1, keepdim=True)  # (B, H, N, C, 1)
    # Views would keep all chunks' states.
    last = LinearAttentionState(S[:, :, -1].clone(), z[:, :, -1, :, 0].clone())
    return sums.flatten(2, 3)[:, :, :T], norms.flatten(2, 3)[:, :, :T], last


def _sums(x: Tensor, decay: Tensor | None) -> Tensor:
    """The sum before each chunk and after the last, given the first and each chunk's update: (B, H,
    N + 1, d, .)."""
    if decay is None:
        return running_sum(x, 2)
    sums = [x[:, :, 0]]
    for n in range(x.shape[2] - 1):
        sums.append(sums[-1] * decay[:, :, n] + x[:, :, n + 1])
    return torch.stack(sums, 2)
