"""Autocast for custom operators: it does not reach inside them, and their backward passes run outside of it."""

import torch
from torch import Tensor


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the type in which autocast computes matrix products; no-op without autocast, or in float64."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)
