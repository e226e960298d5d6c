"""A causal convolution of each feature with its own few weights."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.ops.custom import as_autocast


@torch.no_grad()
def init_conv(weight: Tensor, n_features: int) -> None:
    """Fill weights (W * n_features,) with the identity plus torch's initial Conv1d: uniform, up to
    1 / sqrt(W).

    Weights of the identity alone would have to grow before the model sees the order of tokens,
    which costs 0.03 nats (docs/research.md). They are one vector because vectors have no weight
    decay.
    """
    if weight.is_meta:
        return
    rows = weight.view(-1, n_features)
    rows.uniform_(-(len(rows) ** -0.5), len(rows) ** -0.5)
    rows[-1] += 1


def causal_conv(
    x: Tensor, weight: Tensor | None, inputs: Tensor | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """y_t = sum_i weight_i x_(t - W + 1 + i), elementwise.

    Args:
        x: (B, T, D).
        weight: (W * D,), W rows of D: the last row applies to the token itself. None: y is x, and
            no inputs are kept.
        inputs: (B, W - 1, D), the inputs before x; None is zeros.
        starts: (B, T), bool: these tokens and later ones read zeros in place of the inputs before
            them.

    Returns:
        y (B, T, D), and the last W - 1 inputs, with zeros for those of earlier documents.
    """
    if weight is None:
        return x, None
    (x,) = as_autocast(x)  # what follows is a product, for which x would be rounded anyway
    # Put the W - 1 earlier inputs in front, and keep the last ones for the next call.
    weight = weight.view(-1, x.shape[2]).to(x.dtype)
    W = len(weight)
    T = x.shape[1]
    before = x.new_zeros(len(x), W - 1, x.shape[2]) if inputs is None else inputs.to(x.dtype)
    padded = torch.cat([before, x], dim=1)  # (B, W - 1 + T, D)
    after = padded[:, T:].clone()  # a view would keep all inputs in memory
    # Number the documents, whose tokens do not read those of others.
    document = None
    if starts is not None:
        document = pad(starts.cumsum(1), (W - 1, 0)).unsqueeze(-1)  # (B, W - 1 + T, 1)
        after = after.masked_fill(document[:, T:] != document[:, -1:], 0)
    # Each token's own input, then those before it.
    y = padded[:, W - 1 :] * weight[W - 1]
    # Rows one by one, not by unbind, whose gradient is a stack of sums over tokens: torch 2.10 to
    # 2.13 compiles that wrongly for GPUs, to memory that nothing has written (PyTorch issue
    # 193061).
    for i in range(W - 1):
        earlier = padded[:, i : i + T]
        if document is None:
            y = torch.addcmul(y, earlier, weight[i])
        else:
            is_in_other_document = document[:, i : i + T] != document[:, W - 1 :]
            y = y + (earlier * weight[i]).masked_fill(is_in_other_document, 0)
    return y, after


def no_inputs(weight: Tensor, B: int, D: int) -> Tensor:
    """What `inputs` is before the first token: zeros (B, W - 1, D)."""
    return torch.zeros(B, weight.numel() // D - 1, D, dtype=weight.dtype, device=weight.device)
