"""Log-space attention token by token, entirely in log space: exact for any range of numbers, but slow.

`chunked.py` uses it for tiles (a chunk of tokens in one head) whose sums may have lost terms to underflow. Every
exponential is relative to the sum that it is part of, so no exponent is above 0.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.ops.log_attention.exponentials import Inputs
from model.ops.log_attention.frames import finite
from model.ops.running_sum import running_sum

LARGEST = 2**24  # elements of a temporary


def states(k: Tensor, log_v: Tensor, log_f: Tensor, log_s: Tensor) -> Tensor:
    """Return log_s before each chunk and after the last, (G, N + 1, d_k, E).

    Args:
        k: (G, N, C, d_k).
        log_v: (G, N, C, E).
        log_f: (G, N, C, 1).
        log_s: (G, d_k, E), before the first chunk.
    """
    _, N, C, d_k = k.shape
    before = [log_s]
    heads = max(1, LARGEST // (C * d_k * log_v.shape[-1]))
    kept = running_sum(log_f.flip(2), 2).flip(2)  # (G, N, C, .): of what was there before a token, at the chunk's end
    k = k + pad(kept[:, :, 1:], (0, 0, 0, 1))
    for n in range(N):
        parts = [
            torch.logsumexp(k_n.unsqueeze(-1) + v_n.unsqueeze(-2), dim=1)
            for k_n, v_n in zip(k[:, n].split(heads), log_v[:, n].split(heads), strict=True)
        ]
        before.append(torch.logaddexp(before[-1] + kept[:, n, 0].unsqueeze(-1), torch.cat(parts)))
    return torch.stack(before, 1)


def causal_log_sums(q: Tensor, k: Tensor, log_v: Tensor, log_f: Tensor, log_s: Tensor) -> tuple[Tensor, Tensor]:
    """log_S (P, C, E) of P tiles, and the state after each of their tokens (C, P, d_k, E).

    q (P, C, d_k), k (P, C, d_k), log_v (P, C, E), log_f (P, C, 1), and the state before each tile, log_s (P, d_k, E).
    """
    log_S, after = [], []
    for q_t, k_t, v_t, f_t in zip(*(x.unbind(1) for x in (q, k, log_v, log_f)), strict=True):
        log_s = torch.logaddexp(log_s + f_t.unsqueeze(-1), k_t.unsqueeze(-1) + v_t.unsqueeze(-2))
        log_S.append(torch.logsumexp(q_t.unsqueeze(-1) + log_s, dim=1))
        after.append(log_s)
    return torch.stack(log_S, 1), torch.stack(after)


def causal_gradients(
    q: Tensor, k: Tensor, log_v: Tensor, log_f: Tensor, log_s: Tensor, g_log_S: Tensor, g_after: Tensor
) -> Inputs:
    """Backward of `causal_log_sums`, from the gradients of log_S (P, C, E) and of the last state (P, d_k, E)."""
    log_S, after = causal_log_sums(q, k, log_v, log_f, log_s)
    g, g_q, g_k, g_v, g_f = g_after, [], [], [], []
    for t in reversed(range(q.shape[1])):
        s = after[t]  # (P, d_k, E)
        read = g_log_S[:, t].unsqueeze(-2) * _share(q[:, t].unsqueeze(-1) + s, log_S[:, t].unsqueeze(-2))
        g = g + read
        written = g * _share(k[:, t].unsqueeze(-1) + log_v[:, t].unsqueeze(-2), s)
        g_q.append(read.sum(-1))
        g_k.append(written.sum(-1))
        g_v.append(written.sum(-2))
        g = g * _share((after[t - 1] if t else log_s) + log_f[:, t].unsqueeze(-1), s)
        g_f.append(g.sum(-1))
    of_q, of_k, of_v, of_f = (torch.stack(x[::-1], 1) for x in (g_q, g_k, g_v, g_f))
    return Inputs(of_q, of_k, of_v, of_f.sum(-1, keepdim=True), g)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole) for a term of a log-sum, between 0 and 1; 0 for an empty sum."""
    return (part - finite(whole)).exp_()
