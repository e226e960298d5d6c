"""Sums up to each element, with the same bits every time, on GPUs too."""

import torch
from torch import Tensor


def running_sum(x: Tensor, dim: int) -> Tensor:
    """torch.cumsum; on GPUs with deterministic algorithms, where torch refuses it, log2(length) additions."""
    if x.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(dim)
    length, step = x.shape[dim], 1
    while step < length:
        first, rest = x.narrow(dim, 0, step), x.narrow(dim, step, length - step)
        x, step = torch.cat([first, rest + x.narrow(dim, 0, length - step)], dim), 2 * step
    return x
