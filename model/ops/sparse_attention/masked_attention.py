"""Sparse attention by its definition: T x T scores, a mask, a softmax."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.ops.gates import sum_gates
from model.ops.sparse_attention.patterns import Pattern, document_pattern_mask, pattern_mask


def naive_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    patterns: Sequence[Pattern],
    starts: Tensor | None = None,
    log_f: Tensor | None = None,
) -> Tensor:
    """Child et al. 2019 (arXiv 1904.10509), eqs. 2 and 3. Shapes and result are those of
    `sparse_attention`."""
    t = torch.arange(q.shape[2], device=q.device)
    if starts is None:
        mask = pattern_mask(patterns, t, t)
    else:
        mask = document_pattern_mask(patterns, starts)
    return masked_attention(q, k, v, mask, log_f)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, log_f: Tensor | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over the keys that the mask allows: the definition (Vaswani et al.
    2017, eq. 1).

    Args:
        q: (B, H, T, D).
        k: (B, G, S, D), H a multiple of G: query head h uses key and value head h // (H / G)
            (Ainslie et al. 2023).
        v: (B, G, S, D).
        mask: (..., 1 or H, T, S), bool; True where a query may attend.
        log_f: (B, H, T, 1), what scores forget between key and query (Lin et al. 2025); None:
            nothing.

    Returns:
        (B, H, T, D); 0 where a query has no key.
    """
    n_shared = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(n_shared, dim=1)
    v = v.repeat_interleave(n_shared, dim=1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if log_f is not None:
        scores = scores + sum_gates(log_f).squeeze(-1)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1) * mask  # (B, H, T, S)
    return weights.to(v.dtype) @ v
