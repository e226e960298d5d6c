"""Linear(GLU(x)) that saves only x for the backward pass: the gated features are cheap to recompute."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import glu, linear

from model.ops.autocast import as_autocast


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """(..., 2 D) -> glu(x) @ weight.T, (..., D_out), where glu(a, b) = a sigmoid(b) (Dauphin et al. 2017, eq. 1).

    Args:
        weight: (D_out, D).
    """
    x, weight = as_autocast(x, weight)
    if not torch.is_grad_enabled():  # nothing is saved, and a plain call costs less
        return linear(glu(x), weight)
    with torch.autocast(x.device.type, enabled=False):
        return _GatedLinear.apply(x, weight)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return linear(glu(x), weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        g_x = torch.ops.aten.glu_backward(g @ weight, x, -1)
        return g_x, g.reshape(-1, g.shape[-1]).T @ glu(x).reshape(-1, weight.shape[1])
