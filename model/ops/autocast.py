"""Autocast for operators that it does not see into, and whose backward passes run outside of it."""

import torch
from torch import Tensor


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the type that autocast gives a matrix product here; as they are without it, or in float64."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)
