"""Exponentials that are at most 1, because each is divided by a power of two, the frame of its
chunk.

exp(x) is mantissa x 2^exponent, the exponent a multiple of 64 that is 0 for |x| < 22. A frame is a
power of two, so scaling by it changes no bit of the mantissa: a later token can change the frame of
its chunk without changing the results of earlier tokens, as long as nothing underflows.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.ops.custom import CHUNK, running_sum, split
from model.ops.gates import HEAD_REACH, NO_GATES, Gates, gates_of, resets_of, without

LN2 = math.log(2)
# ln 2 as a sum of two: the first has 4 bits, so that its multiples below FAR are exact in float32.
_LN2_HIGH = 11 / 16
_LN2_LOW = LN2 - _LN2_HIGH
_GRID = 64
# 64 ln 2 as a sum of two: the first has 8 bits, so that all multiples of it below FAR are exact in
# float32.
_GRID_HIGH = math.floor(_GRID * LN2 * 4) / 4
_GRID_LOW = _GRID * LN2 - _GRID_HIGH
_NEAR = _GRID / 2 * LN2  # nearer to 0, the exponent is 0
# Frames end here, because the steps of larger numbers are all rounding. What is below -FAR, such as
# a mask of -1e30, gets the frame -FAR and becomes 0. What is above FAR gets the frame 8 FAR: it and
# all that shares this frame become 0.
FAR = {torch.float32: 2.0**20, torch.float64: 2.0**40}
# Two frames below it and a mantissa between 2^-32 and 2^32 may be multiplied in any order: float32
# ends at 2^127.
_SMALL = 45

# A sum of terms at most 1 that is at least this large has lost to underflow nothing that matters:
# at most the smallest normal number (1.2e-38) for each term, which is 1e-10 of the sum for 10,000
# terms.
CERTAIN = {torch.float32: 1e-24, torch.float64: 1e-280}
_LARGEST_STEP = {torch.float32: 20, torch.float64: 33}
"""Binary digits by which the frame of a chunk may shrink."""


class Inputs(NamedTuple):
    """The inputs for some elements of the batch, or their gradients."""

    q: Tensor
    """(B, H, T, d_k)."""
    k: Tensor
    """(B, H, S, d_k)."""
    log_v: Tensor
    """(B, H, S, d_v)."""
    log_f: Tensor | None
    """(B, H, S, 1)."""
    log_s: Tensor
    """(B, H, d_k, E), in the accumulation type."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """Apply a function to each tensor."""
        return Inputs._make(None if x is None else function(x) for x in self)

    def select(self, batch: slice) -> "Inputs":
        """Select elements of the batch."""
        return self.map(lambda x: x[batch])


class Frames(NamedTuple):
    """Exponents of the powers of two that scale the exponentials of N chunks: whole numbers, 0
    where unknown.
    """

    key: Tensor
    """(N, B, H, 1, d_k); -inf if all keys so far are -inf."""
    value: Tensor
    """(N, B, H, 1, E)."""
    factor: Tensor
    """(N, B, H, d_k, E), N - 1 with all chunks: from M after a chunk to M in the frame of the next
    one."""
    last: Tensor
    """(B, H, d_k, E): of M after the last chunk."""
    C: int
    """Tokens of a chunk."""
    chunks: slice
    """The indices of these chunks."""
    lost: Tensor | None
    """(B, H): whether a head's gates forget so much in a chunk that numbers overflow or underflow;
    None: no gates."""

    def at(self, chunks: slice) -> "Frames":
        """Return the frames of some chunks."""
        return self._replace(
            key=self.key[chunks],
            value=self.value[chunks],
            factor=self.factor[chunks],
            chunks=chunks,
        )

    def split(self, x: Tensor, fill: float) -> Tensor:
        """Split tokens (B, H, t, D) into these chunks (n, B, H, C, D), for sums."""
        return split(x.to(self.value.dtype), self.C, fill)


def frames_of(inputs: Inputs) -> Frames:
    """Return the frames of all chunks, above their tokens and all earlier ones."""
    C = min(CHUNK, inputs.k.shape[2])
    log_s = inputs.log_s  # (B, H, d_k, E)
    log_z = log_s[..., -1]  # (B, H, d_k)
    # Logarithm of the state's mean value, for the feature of keys where it is largest: (B, H, d_v).
    mean = (log_s[..., :-1] - finite(log_s[..., -1:])).amax(2)
    log_decay = None
    if inputs.log_f is not None:
        log_f = split(inputs.log_f.to(log_s.dtype), C, 0.0)  # (N, B, H, C, 1)
        # A reset leaves frames as they are: what follows it is rarely so much smaller.
        log_decay = without(log_f, resets_of(log_f)).sum(3)  # (N, B, H, 1)
    key = _frames_of_chunks(log_z, inputs.k, C, log_decay)
    value = _frames_of_chunks(mean, inputs.log_v, C, None)
    value = pad(value, (0, 1))  # the normalizer's column is 0
    key_steps = key[:-1] - finite(key[1:])
    value_steps = value[:-1] - finite(value[1:])
    lost = None
    if log_decay is not None:
        # What a chunk's keys lost to underflow grows with the frame's steps: it must stay far below
        # CERTAIN.
        shrinks = (key_steps > _LARGEST_STEP[key_steps.dtype]).any(-1).any(0)
        forgets = (log_decay < -HEAD_REACH[log_decay.dtype]).any(-1).any(0)
        lost = shrinks | forgets
    return Frames(
        key=key.unsqueeze(3),
        value=finite(value).unsqueeze(3),
        factor=torch.exp2(key_steps).unsqueeze(-1) * torch.exp2(value_steps).unsqueeze(-2),
        last=key[-1].unsqueeze(-1) + finite(value[-1]).unsqueeze(-2),
        C=C,
        chunks=slice(None),
        lost=lost,
    )


def _frames_of_chunks(before: Tensor, x: Tensor, C: int, log_decay: Tensor | None) -> Tensor:
    """Return the frames (N, B, H, D) of tokens x (B, H, T, D), which include all earlier tokens.

    Args:
        before: (B, H, D), the largest logarithm in the state.
        log_decay: (N, B, H, 1), the sum of log_f over each chunk, without resets; None: no gates.
    """
    top = split(x.to(before.dtype), C, -torch.inf).amax(3)  # (N, B, H, D)
    largest = torch.cat([before[None], top])  # (1 + N, B, H, D)
    if log_decay is None:
        largest = largest.cummax(0).values
    else:
        # Finite, so that no difference is that of two infinities.
        total = running_sum(log_decay.double().clamp(min=-1e9), 0)
        total = pad(total, (0, 0) * 3 + (1, 0))  # of the gates up to each chunk's end
        largest = total + (largest - total).cummax(0).values
    # Queries at the beginning of a chunk see what the chunk's gates have not yet forgotten.
    return frame_above(torch.maximum(largest[:-1], top).to(before.dtype) / LN2)


def gates_at(inputs: Inputs, tokens: slice, frames: Frames) -> Gates:
    """Return the factors of the gates."""
    if inputs.log_f is None:
        return NO_GATES
    return gates_of(frames.split(inputs.log_f[:, :, tokens], 0.0))


def queries(inputs: Inputs, tokens: slice, frames: Frames) -> Tensor:
    """e_q (n, B, H, C, d_k), between 0 and about 1; 1 for padding, so that its sums are certain."""
    q = frames.split(inputs.q[:, :, tokens], 0.0)
    largest = torch.add(frames.key, q, alpha=1 / LN2).amax(-1, keepdim=True)
    row = frame_above(largest)  # (n, B, H, C, 1)
    far = FAR[q.dtype]  # a key above it has the frame 8 far, and e_q is 0 for it, too
    is_beyond = torch.maximum(row, frames.key.amax(-1, keepdim=True)) > far
    return scaled_exp(q, finite(row).masked_fill(is_beyond, 16 * far), -frames.key)


def keys_and_values(inputs: Inputs, tokens: slice, frames: Frames) -> tuple[Tensor, Tensor]:
    """e_k (n, B, H, C, d_k) and e_v (n, B, H, C, E), from 0 to about 1; e_v's last column is 1."""
    k = frames.split(inputs.k[:, :, tokens], -torch.inf)
    log_v = frames.split(inputs.log_v[:, :, tokens], -torch.inf)
    e_k = scaled_exp(k, finite(frames.key))
    e_v = scaled_exp(log_v, frames.value[..., :-1])
    return e_k, pad(e_v, (0, 1), value=1.0)


def in_first_frame(inputs: Inputs, frames: Frames) -> Tensor:
    """M before the first chunk, (B, H, d_k, E)."""
    return scaled_exp(inputs.log_s, finite(frames.key[0]).mT, frames.value[0])


def scaled_exp(x: Tensor, *frames: Tensor) -> Tensor:
    """exp(x) 2^-frame, contiguous; the frame is the sum of those given, which broadcast to x.
    exp(-inf) is 0."""
    x = x.contiguous()
    terms = x
    mask = None
    lowest, highest = torch.aminmax(x)
    if lowest == -torch.inf:  # exp(-inf) is slow, and may become 0 x infinity
        mask = torch.gt(x, -torch.inf, out=torch.empty_like(x))  # 1 or 0
        terms = x.nan_to_num(neginf=0)
        lowest = terms.amin()
    if not (-lowest < _NEAR and highest < _NEAR):
        return _far_exp(x, frames)
    result = terms.exp()
    if all(_is_small(frame) for frame in frames):
        for frame in frames:
            result.mul_(torch.exp2(-frame))
        # masked_fill_ takes 20 times as long.
        return result if mask is None else result.mul_(mask)
    result.mul_(torch.exp2(-sum(frames[1:], frames[0])))  # may be infinite
    return result if mask is None else result.masked_fill_(mask == 0, 0)


def _far_exp(x: Tensor, frames: Sequence[Tensor]) -> Tensor:
    """The same for any x: exp(x) as a mantissa, the exponential of the rest, times 2^exponent."""
    # exp(-far) is 0 even against two frames of -FAR: 2^-2048 is 0 in float64.
    far = (2 * FAR[x.dtype] + 2**11) * LN2
    x = x.clamp(-far, far)
    steps = (x / (_GRID * LN2)).round_()
    rest = (x - steps * _GRID_HIGH).sub_(steps * _GRID_LOW)
    exponent = steps * _GRID
    for frame in frames:
        exponent.sub_(frame)
    return rest.exp_().mul_(exponent.exp2_())


def frame_above(log2: Tensor) -> Tensor:
    """log2 rounded up to an integer, at least -FAR; 8 FAR if log2 is above FAR. -inf stays -inf."""
    far = FAR[log2.dtype]
    frame = log2.ceil().masked_fill_(log2 > far, 8 * far)
    return frame.clamp(min=-far).masked_fill_(log2 == -torch.inf, -torch.inf)


def log_of_scaled(x: Tensor, frame: Tensor) -> Tensor:
    """log(x 2^frame) for x = 0 or x in CERTAIN's range. The result depends only on x 2^frame, not
    on the frame."""
    if _is_small(frame):
        return (x * torch.exp2(frame)).log_()
    mantissa, exponent = torch.frexp(x)
    exponent = exponent + frame
    limit = math.log2(torch.finfo(x.dtype).max) - 2
    is_inside = exponent.abs() < limit
    inside = (mantissa * torch.exp2(exponent.where(is_inside, 0))).log_()
    if is_inside.all():
        return inside
    # exponent ln 2 in two products, of which one is exact: a rounded product would let a state
    # drift that many calls pass on.
    beyond = mantissa.log() + exponent * _LN2_LOW + exponent * _LN2_HIGH
    return inside.where(is_inside, beyond)


def finite(x: Tensor) -> Tensor:
    """`x` with -inf replaced by 0, to avoid -inf - -inf in differences."""
    return torch.where(x == -torch.inf, 0, x)


def _is_small(frame: Tensor) -> bool:
    return bool(frame.abs().amax() < _SMALL)
