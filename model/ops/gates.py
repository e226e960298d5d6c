"""Gates log_f (B, H, T, 1): the logarithm of the share that a head keeps of the tokens before
each."""

import torch
from torch import Tensor


def check_gates(name: str, gates: Tensor) -> None:
    """Raise ValueError if gates, logarithms on a CPU, are above 0."""
    highest = float(gates.detach().amax()) if gates.device.type == "cpu" else 0.0
    if highest > 0:  # NaN passes: training reports the step at which the loss becomes NaN
        raise ValueError(f"{name} has a maximum of {highest}: it must be at most 0")


def sum_gates(log_f: Tensor) -> Tensor:
    """Sum of log_f (B, H, T, 1) over the tokens after j up to t, for every pair: (B, H, T, T, 1), 0
    for j >= t."""
    T = log_f.shape[2]
    is_later = log_f.new_ones(T, T, dtype=torch.bool).tril(-1)  # gate i counts for keys j < i
    return log_f.unsqueeze(3).where(is_later.unsqueeze(-1), 0).cumsum(2)
