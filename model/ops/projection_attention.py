"""Projection attention (Sanger 2025): a query's weights decrease with its squared distance from the
keys.

    y_i = sum_{j <= i} w_ij v_j
    w_ij = exp(-||q_i - k_j||^2 / (2 sigma^2)), each row divided by its sum

The exponent has three terms. That of ||q_i||^2 is the same for all keys and cancels when a row is
normalised. The other two are an inner product of vectors with one more feature, which torch's fused
kernels can compute:

    [q_i / sigma^2, 1 / sigma^2] . [k_j, -||k_j||^2 / 2]

For unit-norm keys this is softmax attention with scale 1 / sigma^2.
"""

import torch
from torch import Tensor

from model.ops.custom import accumulation_dtype, aligned


def naive_projection_attention(
    q: Tensor, k: Tensor, v: Tensor, sigma: Tensor, mask: Tensor
) -> Tensor:
    """The definition: q (B, H, T, D), k and v (B, H, S, D), sigma (H,) -> (B, H, T, D).

    Weights are 0 where `mask`, broadcast to (B, H, T, S), is False. All pairs are in memory.
    """
    squares = (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)  # (B, H, T, S)
    exponents = -squares / (2 * sigma.view(-1, 1, 1) ** 2)
    return exponents.masked_fill(~mask, -torch.inf).softmax(-1) @ v  # exp, and rows normalised


def inner_queries(q: Tensor, sigma: Tensor) -> Tensor:
    """Extend q (B, H, T, D) by the features for `inner_keys`: (B, H, T, D'); sigma is (H,).

    1 / sigma^2 is rounded to q's type first, so that both terms use the same number: every exponent
    is still a distance, only with a slightly different sigma (by up to 0.2 % in bfloat16).
    """
    sharpness = (sigma**-2).to(q.dtype).view(-1, 1, 1).expand(*q.shape[:-1], 1)  # (B, H, T, 1)
    return aligned(torch.cat([q * sharpness, sharpness, sharpness], dim=-1), q.shape[-1] + 2)


def inner_keys(k: Tensor) -> Tensor:
    """Extend k (B, H, S, D) by -||k||^2 / 2: (B, H, S, D').

    This takes two features, the rounded number and the rounding error: the number can be large, and
    a relative error of 2^-9 in bfloat16 would be an error of the exponent. Alignment needs the
    second feature anyway.
    """
    exact = -k.to(accumulation_dtype(k)).square().sum(-1, keepdim=True) / 2  # (B, H, S, 1)
    norm = exact.to(k.dtype)
    error = (exact - norm).detach().to(k.dtype)
    return aligned(torch.cat([k, norm, error], dim=-1), k.shape[-1] + 2)


def padded_values(v: Tensor) -> Tensor:
    """Pad v (B, H, S, D) with zeros to as many features as the keys have: (B, H, S, D'). Fused
    kernels need that."""
    return aligned(v, v.shape[-1] + 2)
