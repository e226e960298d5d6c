"""Linear layers and embeddings with their initial values, and layers whose activations are computed
again."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import glu, linear, rms_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from model.ops.custom import as_autocast

Recompute = Literal["none", "block", "selective"]


class Linear(nn.Linear):
    """A linear layer that starts with weights from N(0, std^2) and biases of 0; std=None: with
    torch's values.

    Its weight is one matrix, or several that a FusedLinear computes at once: `split` and `join`
    know which.
    """

    division: tuple[tuple[int, ...], int] | None = None
    """How rows are divided among matrices; None: there is one."""

    def __init__(self, n_in: int, n_out: int, bias: bool = True, std: float | None = None) -> None:
        self.std = std
        super().__init__(n_in, n_out, bias)

    def reset_parameters(self) -> None:
        """Draw initial values."""
        if self.weight.is_meta:  # has no values, and its operators take seconds to import
            return
        if self.std is None:
            return super().reset_parameters()
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def split(self, weights: Tensor) -> list[Tensor]:
        """Split tensors of the weight's shape (..., rows, columns) into the matrices, by rows."""
        return [weights]

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        return matrices[0]


class FusedLinear(Linear):
    """Several matrices in one weight: queries, keys and values, or the two halves of a gated linear
    unit.

    The weight's rows are `n_group` equal groups, each with `sizes[i]` rows of matrix i, one matrix
    after the other.
    """

    def __init__(self, n_in: int, sizes: Sequence[int], n_group: int = 1) -> None:
        super().__init__(n_in, n_group * sum(sizes))
        self.sizes = tuple(sizes)
        self.n_group = n_group
        self.division = self.sizes, n_group

    def split(self, weights: Tensor) -> list[Tensor]:
        groups = weights.unflatten(-2, (self.n_group, -1))
        return [matrix.flatten(-3, -2) for matrix in groups.split(self.sizes, dim=-2)]

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        groups = [matrix.unflatten(-2, (self.n_group, -1)) for matrix in matrices]
        return torch.cat(groups, dim=-2).flatten(-3, -2)


class RMSNorm(nn.Module):
    """Divides features by their root mean square (Zhang and Sennrich 2019): no weights, and the
    input's type also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], eps=1e-6).to(x.dtype)


class Embedding(nn.Embedding):
    """Embeddings that start uniform between -1 / sqrt(features) and 1 / sqrt(features), or with
    `std` normal."""

    def __init__(self, n: int, n_features: int, std: float | None = None) -> None:
        self.std = std
        super().__init__(n, n_features)

    def reset_parameters(self) -> None:
        """Draw initial values."""
        if self.weight.is_meta:
            return
        bound = self.embedding_dim**-0.5
        if self.std is None:
            nn.init.uniform_(self.weight, -bound, bound)
        else:
            nn.init.normal_(self.weight, std=self.std)


PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
"""Products with weights."""


def recomputing(recompute: Recompute, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the same results, whose activations a backward pass computes again.

    Args:
        recompute: "none": nothing is computed again; "block": everything but the arguments;
            "selective": the same, except products with weights, which are stored.
    """
    if recompute == "none":
        return function
    block = partial(checkpoint, function, use_reentrant=False)
    if recompute == "block":
        return block
    contexts = partial(create_selective_checkpoint_contexts, PRODUCTS)
    return partial(block, context_fn=contexts)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """(..., 2 D) -> glu(x) @ weight.T, (..., D_out), where glu(a, b) = a sigmoid(b) (Dauphin et al.
    2017, eq. 1).

    Saves only x for the backward pass: the gated features are cheap to recompute.

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
