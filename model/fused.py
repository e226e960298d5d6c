"""Linear layers of the same input as one product."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FusedLinear(nn.Linear):
    """Several matrices in one weight: queries, keys and values, or the two halves of a gated linear unit.

    The weight's rows are `n_group` equal groups, each with `parts[i]` rows of matrix i, one matrix after the other.
    """

    def __init__(self, in_features: int, parts: Sequence[int], n_group: int = 1) -> None:
        super().__init__(in_features, n_group * sum(parts))
        self.parts, self.n_group = tuple(parts), n_group

    def split(self, weights: Tensor) -> list[Tensor]:
        """The matrices in tensors of the weight's shape (..., rows, columns), each with its own rows."""
        groups = weights.unflatten(-2, (self.n_group, -1))
        return [part.flatten(-3, -2) for part in groups.split(self.parts, dim=-2)]

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """The tensors that `split` splits into these."""
        return torch.cat([part.unflatten(-2, (self.n_group, -1)) for part in matrices], dim=-2).flatten(-3, -2)
