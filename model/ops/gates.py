"""Gates log_f (B, H, T, 1): the logarithm of the share that a head keeps of the tokens before
each."""

import torch
from torch import Tensor


def check_gates(log_f: Tensor, q: Tensor) -> None:
    """Raise ValueError if gates do not fit queries q (B, H, T, d), or, on a CPU, are above 0."""
    shape = (*q.shape[:3], 1)
    if log_f.shape != shape:
        raise ValueError(f"log_f {tuple(log_f.shape)} must be {shape}, one gate for a head's token")
    if log_f.device.type != "cpu" or torch.compiler.is_compiling():
        return
    highest = float(log_f.detach().amax())
    if highest > 0:  # NaN passes: training reports the step at which the loss becomes NaN
        raise ValueError(f"log_f has a maximum of {highest}: gates must be between -inf and 0")


def forgotten(log_f: Tensor) -> Tensor:
    """Sum of log_f (B, H, T, 1) over the tokens after j up to t, for every pair: (B, H, T, T, 1), 0
    for j >= t."""
    T = log_f.shape[2]
    is_later = log_f.new_ones(T, T, dtype=torch.bool).tril(-1)  # gate i counts for keys j < i
    return log_f.unsqueeze(3).where(is_later.unsqueeze(-1), 0).cumsum(2)
