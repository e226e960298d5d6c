"""A causal convolution of each feature with its own few weights."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


def identity_conv(width: int, n_features: int) -> nn.Parameter:
    """Weights (width * n_features,) with which `causal_conv` is the identity; a vector, which has no weight decay."""
    weight = torch.zeros(width, n_features)
    weight[-1] = 1
    return nn.Parameter(weight.flatten())


def causal_conv(
    x: Tensor, weight: Tensor, seen: Tensor | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y_t = sum_i weight_i x_(t - W + 1 + i), elementwise.

    Args:
        x: (B, T, D).
        weight: (W * D,), W rows of D: the last row applies to the token itself.
        seen: (B, W - 1, D), the inputs before x; None is zeros.
        starts: (B, T), bool: these tokens and later ones read zeros in place of the inputs before them.

    Returns:
        y (B, T, D), and the last W - 1 inputs.
    """
    weight = weight.view(-1, x.shape[2]).to(x.dtype)
    W, T = len(weight), x.shape[1]
    before = x.new_zeros(len(x), W - 1, x.shape[2]) if seen is None else seen.to(x.dtype)
    padded = torch.cat([before, x], dim=1)  # (B, W - 1 + T, D)
    document = None if starts is None else pad(starts.cumsum(1), (W - 1, 0)).unsqueeze(-1)  # (B, W - 1 + T, 1)
    y = x * weight[-1]
    for i in range(W - 1):
        earlier = padded[:, i : i + T]
        if document is not None:
            earlier = earlier.masked_fill(document[:, i : i + T] != document[:, W - 1 :], 0)
        y = torch.addcmul(y, earlier, weight[i])
    return y, padded[:, T:].clone()  # a view would keep all inputs in memory
