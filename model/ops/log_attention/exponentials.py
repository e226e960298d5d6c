"""Exponentials that are at most 1, because each is divided by a power of two, the frame of its chunk.

exp(x) is mantissa x 2^exponent, the exponent a multiple of 64 that is 0 for |x| < 22. A frame is a power of two, so
scaling by it changes no bit of the mantissa: a later token can change the frame of its chunk without changing the
results of earlier tokens, as long as nothing underflows.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.ops.gates import HEAD_REACH, NO_GATES, Gates, gates_of, resets_of, without
from model.ops.log_attention.chunks import CHUNK, blocks, maxima, split
from model.ops.running_sum import running_sum

LN2 = math.log(2)
# ln 2 in two parts: the first has 4 bits, so that its multiples below FAR are exact in float32.
_LN2_HIGH = 11 / 16
_LN2_LOW = LN2 - _LN2_HIGH
_GRID = 64
# 64 ln 2 in two parts: the first has 8 bits, so that all multiples of it below FAR are exact in float32.
_GRID_HIGH = math.floor(_GRID * LN2 * 4) / 4
_GRID_LOW = _GRID * LN2 - _GRID_HIGH
# Frames end here, because the steps of larger numbers are all rounding. What is below -FAR, such as a mask of -1e30,
# gets the frame -FAR and becomes 0. What is above FAR gets the frame 8 FAR: it and all that shares this frame become 0.
FAR = {torch.float32: 2.0**20, torch.float64: 2.0**40}
# Two frames below it and a mantissa between 2^-32 and 2^32 may be multiplied in any order: float32 ends at 2^127.
_SMALL = 45

# A sum of terms at most 1 that is at least this large has lost to underflow nothing that matters: at most the smallest
# normal number (1.2e-38) for each term, which is 1e-10 of the sum for 10,000 terms.
CERTAIN = {torch.float32: 1e-24, torch.float64: 1e-280}
_LARGEST_STEP = {torch.float32: 20, torch.float64: 33}  # binary digits by which the frame of a chunk may shrink


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

    def each(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """Apply a function to each tensor."""
        return Inputs._make(None if x is None else function(x) for x in self)

    def of(self, batch: slice) -> "Inputs":
        """Select elements of the batch."""
        return self.each(lambda x: x[batch])


class Frames(NamedTuple):
    """Exponents of the powers of two that scale the exponentials of N chunks: whole numbers, 0 where unknown."""

    key: Tensor
    """(N, B, H, 1, d_k); -inf if all keys so far are -inf."""
    value: Tensor
    """(N, B, H, 1, E)."""
    factor: Tensor
    """(N, B, H, d_k, E), N - 1 with all chunks: from M after a chunk to M in the frame of the next one."""
    C: int | None
    """Tokens of a chunk; None if all tokens are one."""
    chunks: slice
    """The indices of these chunks."""
    lost: Tensor | None = None
    """(B, H): with gates, whether a head forgets so much in a chunk that numbers overflow or underflow."""

    def of(self, chunks: slice) -> "Frames":
        """Select chunks."""
        return Frames(self.key[chunks], self.value[chunks], self.factor[chunks], self.C, chunks)

    def split(self, x: Tensor, fill: float) -> Tensor:
        """Split tokens (B, H, t, D) into these chunks, in the accumulation type: (n, B, H, C, D)."""
        return split(x.to(self.value.dtype), self.C or x.shape[2], fill)


def frames_of(inputs: Inputs, causal: bool) -> Frames:
    """Return the frames of all chunks (one chunk if not causal), including the state's tokens as far as known."""
    C = min(CHUNK, inputs.k.shape[2]) if causal else inputs.k.shape[2]
    log_s, log_z = inputs.log_s, inputs.log_s[..., -1]  # (B, H, d_k, E), (B, H, d_k)
    mean = (log_s - finite(log_s[..., -1:])).amax(2)  # (B, H, E): of log_v, over the state's tokens
    log_v = maxima(inputs.log_v, C).to(log_s.dtype)
    values = frame_above(torch.cat([mean[None], pad(log_v, (0, 1))]) / LN2).cummax(0).values  # (1 + N, B, H, E)
    lost = None
    if inputs.log_f is None:
        k = maxima(inputs.k, C).to(log_s.dtype)
        keys = frame_above(torch.cat([log_z[None], k]) / LN2).cummax(0).values  # (1 + N, B, H, d_k)
        decay = torch.exp2(keys[:-1] - finite(keys[1:]))  # (N, B, H, d_k), at most 1
    else:
        keys, decay, lost = _frames_with_gates(inputs)
    rescale = torch.exp2(values[:-1] - finite(values[1:]))  # (N, B, H, E), at most 1
    factor = decay[1:].unsqueeze(-1) * rescale[1:].unsqueeze(-2)
    own_C, chunks = (C, slice(None)) if causal else (None, slice(1))
    return Frames(keys[1:].unsqueeze(3), finite(values[1:]).unsqueeze(3), factor, own_C, chunks, lost)


def _frames_with_gates(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys' frames (1 + N, B, H, d_k), the factors from one to the next, and `Frames.lost`."""
    log_z = inputs.log_s[..., -1]
    top, kept, passed_on = (torch.cat(x) for x in zip(*_forgotten(inputs), strict=True))  # (N, B, H, d_k or 1)
    # What is measured in the frame of a chunk: the keys before it, as far as they are left, and its own.
    sums = running_sum(passed_on.double().clamp(min=-1e9), 0)
    passed = pad(sums, (0, 0) * 3 + (1, 0))
    left = passed + (torch.cat([log_z[None], top]) - passed).cummax(0).values  # (1 + N, B, H, d_k)
    key = frame_above(torch.maximum(left[:-1], top).to(log_z.dtype) / LN2)
    keys = torch.cat([key[:1], key])
    steps = keys[:-1] - finite(keys[1:])
    # What a chunk's keys lost to underflow grows with the frame's steps: it must stay far below CERTAIN.
    lost = (steps > _LARGEST_STEP[steps.dtype]) | (kept < -HEAD_REACH[kept.dtype])
    return keys, torch.exp2(steps), lost.any(-1).any(0)


def _forgotten(inputs: Inputs) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield, for the chunks of a block, the largest key, and the sum of log_f without and with resets."""
    assert inputs.log_f is not None
    C, dtype = min(CHUNK, inputs.k.shape[2]), inputs.log_s.dtype
    for tokens, _ in blocks(inputs.k):
        f = split(inputs.log_f[:, :, tokens].to(dtype), C, 0.0)  # (n, B, H, C, 1)
        k = split(inputs.k[:, :, tokens].to(dtype), C, -torch.inf)
        reset = resets_of(f)
        kept = without(f, reset).sum(3)
        yield k.amax(3), kept, kept if reset is None else kept.masked_fill(reset.any(3), -torch.inf)


def gates_at(inputs: Inputs, tokens: slice, frames: Frames) -> Gates:
    """Return the factors of the gates."""
    return NO_GATES if inputs.log_f is None else gates_of(frames.split(inputs.log_f[:, :, tokens], 0.0))


def queries(inputs: Inputs, tokens: slice, frames: Frames) -> Tensor:
    """e_q (n, B, H, C, d_k), between 0 and about 1; 1 for padding, so that its sums are certain."""
    q = frames.split(inputs.q[:, :, tokens], 0.0)
    row = frame_above(torch.add(frames.key, q, alpha=1 / LN2).amax(-1, keepdim=True))  # (n, B, H, C, 1)
    far = FAR[q.dtype]  # a key above it has the frame 8 far, and e_q is 0 for it, too
    beyond = torch.maximum(row, frames.key.amax(-1, keepdim=True)) > far
    return scaled_exp(q, finite(row).masked_fill(beyond, 16 * far), -frames.key)


def keys_and_values(inputs: Inputs, tokens: slice, frames: Frames) -> tuple[Tensor, Tensor]:
    """e_k (n, B, H, C, d_k) and e_v (n, B, H, C, E), between 0 and about 1; e_v's last column is 1."""
    e_k = scaled_exp(frames.split(inputs.k[:, :, tokens], -torch.inf), finite(frames.key))
    log_v = frames.split(inputs.log_v[:, :, tokens], -torch.inf)
    return e_k, pad(scaled_exp(log_v, frames.value[..., :-1]), (0, 1), value=1.0)


def in_first_frame(inputs: Inputs, frames: Frames) -> Tensor:
    """M before the first chunk, (B, H, d_k, E)."""
    return scaled_exp(inputs.log_s, finite(frames.key[0]).mT, frames.value[0])


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
    # A product that rounds would let a state drift that is passed through many calls.
    return direct if inside.all() else direct.where(inside, mantissa.log() + exponent * _LN2_LOW + exponent * _LN2_HIGH)


def finite(x: Tensor) -> Tensor:
    """`x` with -inf replaced by 0, to avoid -inf - -inf in differences."""
    return torch.where(x == -torch.inf, 0, x)


def _is_small(frame: Tensor) -> bool:
    return bool(frame.abs().amax() < _SMALL)
