"""Values of either sign, in real arithmetic: separate log-sums of the positive and the negative values."""

import torch
from torch import Tensor


def split_signs(log_abs_v: Tensor, sign_v: Tensor) -> Tensor:
    """(B, H, S, d_v) twice -> log_v (B, H, S, 2 d_v): positive values, then negative ones; -inf for the others."""
    has_part = torch.stack([sign_v > 0, sign_v < 0], dim=-2)  # (B, H, S, 2, d_v)
    return torch.where(has_part, log_abs_v.unsqueeze(-2), -torch.inf).flatten(-2)


def join_signs(log_y: Tensor) -> tuple[Tensor, Tensor]:
    """log |y| and sign of y = exp(positive) - exp(negative), each (..., d_v), from their logarithms (..., 2 d_v).

    Where they cancel exactly, log |y| is -inf, and the sign and the gradient are 0.
    """
    positive, negative = log_y.chunk(2, dim=-1)
    sign = (positive > negative).to(log_y.dtype) - (positive < negative).to(log_y.dtype)
    nothing = positive == negative
    larger = torch.maximum(positive, negative).masked_fill(nothing, 0)
    gap = (torch.minimum(positive, negative) - larger).masked_fill(nothing, -1)  # below 0
    return (larger + torch.log(-torch.expm1(gap))).masked_fill(nothing, -torch.inf), sign
