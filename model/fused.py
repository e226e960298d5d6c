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

    def split(self, weight: Tensor) -> list[Tensor]:
        """The matrices in a tensor of the weight's shape, each with its own rows."""
        return [part.flatten(0, 1) for part in weight.unflatten(0, (self.n_group, -1)).split(self.parts, dim=1)]

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """The tensor that `split` splits into these."""
        return torch.cat([part.unflatten(0, (self.n_group, -1)) for part in matrices], dim=1).flatten(0, 1)
