"""Exponentials that neither overflow nor depend on what they are measured against.

exp(x) is kept as mantissa x 2^exponent, the exponent a multiple of 64 that is 0 for |x| < 22. A frame is a power of
two, so measuring against it changes no bit of the mantissa: a later token can move the frame of its chunk, and no
result before it changes, as long as nothing underflows.
"""

import math

import torch
from torch import Tensor

LN2 = math.log(2)
_GRID = 64
# 64 ln 2 in two parts: the first has so few bits that small multiples of it are exact in float32.
_GRID_HIGH = math.floor(_GRID * LN2 * 256) / 256
_GRID_LOW = _GRID * LN2 - _GRID_HIGH

# A sum of terms at most 1 that is at least this large has lost to underflow nothing that matters: at most the smallest
# normal number (1.2e-38) for each term, which is 1e-10 of the sum for 10,000 terms.
CERTAIN = {torch.float32: 1e-24, torch.float64: 1e-280}


def split_exp(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """exp(x) as mantissa x 2^exponent; None stands for exponents that are all 0. -inf gives a mantissa of 0."""
    if x.abs().amax() < _GRID / 2 * LN2:
        return x.exp(), None
    steps = (x / (_GRID * LN2)).round_().masked_fill_(x == -torch.inf, 0)
    return (x - steps * _GRID_HIGH).sub_(steps * _GRID_LOW).exp_(), steps * _GRID


def scaled(mantissa: Tensor, exponent: Tensor | None, frame: Tensor) -> Tensor:
    """mantissa x 2^(exponent - frame)."""
    return mantissa * torch.exp2(-frame if exponent is None else exponent - frame)


def whole_log2(x: Tensor) -> Tensor:
    """The smallest whole n with exp(x) <= 2^n, up to rounding; -inf of -inf."""
    return (x / LN2).ceil_()


def log_of_scaled(x: Tensor, frame: Tensor) -> Tensor:
    """log(x 2^frame): a function of that number alone, whatever frame it is given in."""
    mantissa, exponent = torch.frexp(x)
    exponent = exponent + frame
    limit = math.log2(torch.finfo(x.dtype).max) - 2
    inside = exponent.abs() < limit
    direct = (mantissa * torch.exp2(exponent.where(inside, 0))).log_()
    return direct if inside.all() else direct.where(inside, mantissa.log() + exponent * LN2)
