"""A causal convolution of each feature with its own few weights."""

import torch
from torch import Tensor


def causal_conv(x: Tensor, weight: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y_t = sum_i weight_i x_(t - W + 1 + i), elementwise.

    Args:
        x: (B, T, D).
        weight: (W, D); the last row applies to the token itself.
        seen: (B, W - 1, D), the inputs before x; None is zeros.

    Returns:
        y (B, T, D), and the last W - 1 inputs.
    """
    W, T = len(weight), x.shape[1]
    before = x.new_zeros(len(x), W - 1, x.shape[2]) if seen is None else seen.to(x.dtype)
    padded = torch.cat([before, x], dim=1)  # (B, W - 1 + T, D)
    y = x * weight[-1]
    for i in range(W - 1):
        y = torch.addcmul(y, padded[:, i : i + T], weight[i].to(y.dtype))
    return y, padded[:, T:].clone()  # a view would keep all inputs in memory
