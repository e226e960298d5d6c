"""The documents of windows of tokens, given starts (B, T), bool: where one starts. A window starts
one in any case."""

import torch
from torch import Tensor


def document_positions(starts: Tensor) -> Tensor:
    """Return the position of each token in its document, int64 (B, T)."""
    t = torch.arange(starts.shape[1], device=starts.device)
    return t - t.where(starts, 0).cummax(1).values


def document_mask(starts: Tensor) -> Tensor:
    """Return the keys of a query's own document up to its own, bool (B, 1, T, T)."""
    number = starts.cumsum(1)
    return (number.unsqueeze(2) == number.unsqueeze(1)).tril().unsqueeze(1)
