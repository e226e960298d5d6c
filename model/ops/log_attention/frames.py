"""Exponentials that do not overflow, and whose mantissa does not depend on their scale.

exp(x) is mantissa x 2^exponent, the exponent a multiple of 64 that is 0 for |x| < 22. A frame is a power of two, so
scaling by it changes no bit of the mantissa: a later token can change the frame of its chunk without changing the
results of earlier tokens, as long as nothing underflows.
"""

import math

import torch
from torch import Tensor

LN2 = math.log(2)
_GRID = 64
# 64 ln 2 in two parts: the first has so few bits that small multiples of it are exact in float32.
_GRID_HIGH = math.floor(_GRID * LN2 * 256) / 256
_GRID_LOW = _GRID * LN2 - _GRID_HIGH
# Frames end here, because the steps of larger numbers are all rounding. What is below -FAR, such as a mask of -1e30,
# gets the frame -FAR and becomes 0. What is above FAR gets the frame 8 FAR: it and all that shares this frame become 0.
FAR = {torch.float32: 2.0**20, torch.float64: 2.0**40}
# Two frames below it and a mantissa between 2^-32 and 2^32 may be multiplied in any order: float32 ends at 2^127.
_SMALL = 45

# A sum of terms at most 1 that is at least this large has lost to underflow nothing that matters: at most the smallest
# normal number (1.2e-38) for each term, which is 1e-10 of the sum for 10,000 terms.
CERTAIN = {torch.float32: 1e-24, torch.float64: 1e-280}


def scaled_exp(x: Tensor, *frames: Tensor) -> Tensor:
    """exp(x) 2^-frame, contiguous; the frame is the sum of those given, which broadcast to x. exp(-inf) is 0."""
    x = x.contiguous()
    lowest, highest = torch.aminmax(x)
    counts = None
    if lowest == -torch.inf:  # exp(-inf) is slow, and may become 0 x infinity
        counts = torch.gt(x, -torch.inf, out=torch.empty_like(x))  # 1 or 0
        x = x.nan_to_num(neginf=0, posinf=torch.inf)
        lowest = x.amin()
    if -lowest < _GRID / 2 * LN2 and highest < _GRID / 2 * LN2:
        result = x.exp()
        if all(_is_small(frame) for frame in frames):
            for frame in frames:
                result.mul_(torch.exp2(-frame))
            return result if counts is None else result.mul_(counts)  # masked_fill_ takes 20 times as long
        result.mul_(torch.exp2(-sum(frames[1:], frames[0])))
    else:
        far = (2 * FAR[x.dtype] + 2**11) * LN2  # -far is 0 even against two frames of -FAR: 2^-2048 is 0 in float64
        x = x.clamp(-far, far)
        steps = (x / (_GRID * LN2)).round_()
        result = (x - steps * _GRID_HIGH).sub_(steps * _GRID_LOW).exp_()
        result.mul_((steps * _GRID - sum(frames[1:], frames[0])).exp2_())
    return result if counts is None else result.masked_fill_(counts == 0, 0)


def frame_above(log2: Tensor) -> Tensor:
    """log2 rounded up to an integer, at least -FAR; 8 FAR if log2 is above FAR. -inf stays -inf."""
    far = FAR[log2.dtype]
    frame = log2.ceil().masked_fill_(log2 > far, 8 * far)
    return frame.clamp(min=-far).masked_fill_(log2 == -torch.inf, -torch.inf)


def log_of_scaled(x: Tensor, frame: Tensor) -> Tensor:
    """log(x 2^frame) for x = 0 or x in CERTAIN's range. The result depends only on x 2^frame, not on the frame."""
    if _is_small(frame):
        return (x * torch.exp2(frame)).log_()
    mantissa, exponent = torch.frexp(x)
    exponent = exponent + frame
    limit = math.log2(torch.finfo(x.dtype).max) - 2
    inside = exponent.abs() < limit
    direct = (mantissa * torch.exp2(exponent.where(inside, 0))).log_()
    return direct if inside.all() else direct.where(inside, mantissa.log() + exponent * LN2)


def finite(x: Tensor) -> Tensor:
    """`x` with -inf replaced by 0, to avoid -inf - -inf in differences."""
    return torch.where(x == -torch.inf, 0, x)


def _is_small(frame: Tensor) -> bool:
    return bool(frame.abs().amax() < _SMALL)
