"""A causal convolution of each feature with its own few weights."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.ops.custom import as_autocast


@torch.no_grad()
def init_conv(weight: Tensor, n_features: int) -> None:
    """Fill weights (W * n_features,) with the identity plus torch's initial Conv1d: uniform, up to 1 / sqrt(W).

    Weights of the identity alone would have to grow before the model sees the order of tokens, which costs 0.03 nats
    (docs/research.md). They are one vector because vectors have no weight decay.
    """
    rows = weight.view(-1, n_features)
    rows.uniform_(-(len(rows) ** -0.5), len(rows) ** -0.5)
    rows[-1] += 1


def causal_conv(
    x: Tensor, weight: Tensor | None, seen: Tensor | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """y_t = sum_i weight_i x_(t - W + 1 + i), elementwise.

    Args:
        x: (B, T, D).
        weight: (W * D,), W rows of D: the last row applies to the token itself. None: y is x, and no inputs are kept.
        seen: (B, W - 1, D), the inputs before x; None is zeros.
        starts: (B, T), bool: these tokens and later ones read zeros in place of the inputs before them.

    Returns:
        y (B, T, D), and the last W - 1 inputs, with zeros for those of earlier documents.
    """
    if weight is None:
        return x, None
    (x,) = as_autocast(x)  # what follows is a product, for which x would be rounded anyway
    weight = weight.view(-1, x.shape[2]).to(x.dtype)
    W, T = len(weight), x.shape[1]
    before = x.new_zeros(len(x), W - 1, x.shape[2]) if seen is None else seen.to(x.dtype)
    padded = torch.cat([before, x], dim=1)  # (B, W - 1 + T, D)
    others, after = None, padded[:, T:].clone()  # a view would keep all inputs in memory
    if starts is not None:
        document = pad(starts.cumsum(1), (W - 1, 0)).unsqueeze(-1)  # (B, W - 1 + T, 1)
        others = document.unfold(1, T, 1).mT != document[:, W - 1 :].unsqueeze(1)  # (B, W, T, 1)
        after = after.masked_fill(document[:, T:] != document[:, -1:], 0)
    return _CausalConv.apply(padded, weight, others), after


def no_inputs(weight: Tensor, B: int, D: int) -> Tensor:
    """What `seen` is before the first token: zeros (B, W - 1, D)."""
    return torch.zeros(B, weight.numel() // D - 1, D, dtype=weight.dtype, device=weight.device)


class _CausalConv(torch.autograd.Function):
    """The sum over weights. Its gradients are faster than autograd's, which copy every slice."""

    @staticmethod
    def forward(padded: Tensor, weight: Tensor, others: Tensor | None) -> Tensor:
        y = padded[:, len(weight) - 1 :] * weight[-1]
        for earlier, row in zip(_earlier(padded, weight, others), weight, strict=False):
            y.addcmul_(earlier, row)
        return y.view_as(
            y
        )  # compiled by torch 2.11, a result that was written in place would lose its gradient

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor
    ) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        padded, weight, others = ctx.saved_tensors
        W, T = len(weight), g.shape[1]
        g_padded = pad(g * weight[-1], (0, 0, W - 1, 0))
        g_rows = []
        for i, earlier in enumerate(_earlier(padded, weight, others)):
            g_rows.append((g * earlier).sum((0, 1)))
            g_i = g if others is None else g.masked_fill(others[:, i], 0)
            g_padded[:, i : i + T].addcmul_(g_i, weight[i])
        g_rows.append((g * padded[:, W - 1 :]).sum((0, 1)))
        return g_padded, torch.stack(g_rows), None


def _earlier(padded: Tensor, weight: Tensor, others: Tensor | None) -> Iterator[Tensor]:
    """The inputs (B, T, D) that each row of weights but the last multiplies; those of other documents are zeros."""
    W = len(weight)
    for i in range(W - 1):
        earlier = padded[:, i : padded.shape[1] - (W - 1) + i]
        yield earlier if others is None else earlier.masked_fill(others[:, i], 0)
