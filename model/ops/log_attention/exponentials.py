"""Exponentials that are at most 1, because each is divided by a power of two, the frame of its chunk.

exp(x) is mantissa x 2^exponent, the exponent a multiple of 64 that is 0 for |x| < 22. A frame is a power of two, so
scaling by it changes no bit of the mantissa: a later token can change the frame of its chunk without changing the
results of earlier tokens, as long as nothing underflows.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.ops.custom import running_sum
from model.ops.gates import HEAD_REACH, NO_GATES, Gates, gates_of, resets_of, without
from model.ops.log_attention.chunks import CHUNK, maxima, split

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
_NEAR = 16  # binary digits by which frames before and after a reset may differ so that one will do for both
_LARGEST_STEP = {
    torch.float32: 20,
    torch.float64: 33,
}  # binary digits by which the frame of a chunk may shrink


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
    """Exponents of the powers of two that scale the exponentials of N chunks: whole numbers, 0 where unknown.

    Sums before a reset and after it have no terms in common, so their frames may be as far apart as their terms are.
    """

    key: Tensor
    """(N, B, H, 1, d_k); -inf if all keys so far are -inf. (N, B, H, C, d_k) where frames change within a chunk."""
    value: Tensor
    """(N, B, H, 1, E), or (N, B, H, C, E)."""
    factor: Tensor
    """(N, B, H, d_k, E), N - 1 with all chunks: from M after a chunk to M in the frame of the next one."""
    last: Tensor
    """(B, H, d_k, E): of M after the last chunk."""
    C: int | None
    """Tokens of a chunk; None if all tokens are one."""
    chunks: slice
    """The indices of these chunks."""
    apart: tuple[bool, bool]
    """Whether frames of keys, and of values, change at the resets within a chunk."""
    lost: Tensor | None
    """(B, H): with gates, whether a head forgets so much in a chunk that numbers overflow or underflow."""

    def at(self, inputs: Inputs, tokens: slice, chunks: slice) -> "Frames":
        """Return the frames of some chunks, given both their tokens and their numbers."""
        key, value = self.key[chunks], self.value[chunks]
        if any(self.apart) and inputs.log_f is not None:
            reset = resets_of(self.split(inputs.log_f[:, :, tokens], 0.0))
            k, log_v = (self.split(x[:, :, tokens], -torch.inf) for x in (inputs.k, inputs.log_v))
            if reset is not None and self.apart[0]:
                key = _at_tokens(key, k, reset)
            if reset is not None and self.apart[1]:
                value = finite(_at_tokens(value, pad(log_v, (0, 1)), reset))
        return self._replace(key=key, value=value, factor=self.factor[chunks], chunks=chunks)

    def split(self, x: Tensor, fill: float) -> Tensor:
        """Split tokens (B, H, t, D) into these chunks, in the accumulation type: (n, B, H, C, D)."""
        return split(x.to(self.value.dtype), self.C or x.shape[2], fill)


def frames_of(inputs: Inputs, causal: bool) -> Frames:
    """Return the frames of all chunks (one chunk if not causal), including the state's tokens as far as known."""
    C = min(CHUNK, inputs.k.shape[2]) if causal else inputs.k.shape[2]
    log_s, log_z = inputs.log_s, inputs.log_s[..., -1]  # (B, H, d_k, E), (B, H, d_k)
    mean = (log_s[..., :-1] - finite(log_s[..., -1:])).amax(
        2
    )  # (B, H, E - 1): of log_v, over the state's tokens
    kept = reset = lost = None
    if inputs.log_f is not None:
        f = split(inputs.log_f.to(log_s.dtype), C, 0.0)  # (N, B, H, C, 1)
        reset = resets_of(f)
        kept = without(f, reset).sum(3)  # (N, B, H, 1)
    key, key_end, key_apart = _starts_and_ends(log_z, inputs.k, C, kept, reset)
    value, value_end, value_apart = _starts_and_ends(mean, inputs.log_v, C, None, reset)
    value, value_end = (pad(x, (0, 1)) for x in (value, value_end))  # the normalizer's column is 0
    steps = key_end[:-1] - finite(key[1:])
    factor = torch.exp2(steps).unsqueeze(-1) * torch.exp2(
        value_end[:-1] - finite(value[1:])
    ).unsqueeze(-2)
    if kept is not None:
        # What a chunk's keys lost to underflow grows with the frame's steps: it must stay far below CERTAIN.
        lost = (steps > _LARGEST_STEP[steps.dtype]).any(-1).any(0) | (
            kept < -HEAD_REACH[kept.dtype]
        ).any(-1).any(0)
    last = key_end[-1].unsqueeze(-1) + finite(value_end[-1]).unsqueeze(-2)
    own_C, chunks, apart = (
        C if causal else None,
        slice(None if causal else 1),
        (key_apart, value_apart),
    )
    return Frames(
        key.unsqueeze(3), finite(value).unsqueeze(3), factor, last, own_C, chunks, apart, lost
    )


def _starts_and_ends(
    before: Tensor, x: Tensor, C: int, kept: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor, bool]:
    """Return the frames of tokens x (B, H, T, D) at each chunk's start and end (N, B, H, D), and whether they differ.

    Args:
        before: (B, H, D), the largest logarithm in the state.
        kept: (N, B, H, 1), what gates keep of earlier tokens in a chunk, apart from resets; None: all.
        reset: (N, B, H, C, 1), which tokens are resets.
    """
    top = maxima(x, C).to(before.dtype)  # (N, B, H, D)
    if reset is None:
        first = last = top
    else:  # what is before the first reset, and after the last one
        with_reset = reset.any(3).squeeze(-1)  # (N, B, H)
        tops = _tops(
            split(x, C, -torch.inf)[with_reset].to(before.dtype),
            segment := reset.cumsum(3)[with_reset],
        )
        first, last = top.clone(), top.clone()
        first[with_reset] = tops[:, 0]
        last[with_reset] = tops.gather(1, segment[:, -1:].expand(-1, -1, x.shape[3])).squeeze(1)
        kept = torch.zeros_like(top[..., :1]) if kept is None else kept
        kept = kept.masked_fill(reset.any(3), -torch.inf)
    left = torch.cat([before[None], last])  # (1 + N, B, H, D)
    if kept is None:
        left = left.cummax(0).values
    else:
        passed = pad(running_sum(kept.double().clamp(min=-1e9), 0), (0, 0) * 3 + (1, 0))
        left = passed + (left - passed).cummax(0).values
    start = frame_above(torch.maximum(left[:-1], first).to(before.dtype) / LN2)
    if reset is None:
        return start, start, False
    distance = start[with_reset].unsqueeze(1) - frame_above(
        tops / LN2
    )  # infinite, or NaN, where there are no terms
    apart = bool((distance.isfinite() & (distance.abs() > _NEAR)).any())
    end = frame_above(last / LN2)
    if not apart:
        start = torch.maximum(start, frame_above(top / LN2))
        end = torch.where(end > -torch.inf, start, end)
    return start, torch.where(reset.any(3), end, start), apart


def _tops(x: Tensor, segment: Tensor) -> Tensor:
    """Return the largest of x (..., C, D) in each segment (..., S, D), where `segment` (..., C, 1) counts from 0."""
    S = 1 + int(segment.amax()) if len(x) else 1
    tops = x.new_full((*x.shape[:-2], S, x.shape[-1]), -torch.inf)
    return tops.scatter_reduce_(-2, segment.expand_as(x), x, "amax")


def _at_tokens(start: Tensor, x: Tensor, reset: Tensor) -> Tensor:
    """Return the frames of tokens x (n, B, H, C, D): `start` (n, B, H, 1, D) before a reset, else their segment's."""
    segment = reset.cumsum(3)
    frames = frame_above(_tops(x, segment) / LN2)
    frames[..., :1, :] = start
    return frames.gather(3, segment.expand_as(x))


def gates_at(inputs: Inputs, tokens: slice, frames: Frames) -> Gates:
    """Return the factors of the gates."""
    return (
        NO_GATES
        if inputs.log_f is None
        else gates_of(frames.split(inputs.log_f[:, :, tokens], 0.0))
    )


def queries(inputs: Inputs, tokens: slice, frames: Frames) -> Tensor:
    """e_q (n, B, H, C, d_k), between 0 and about 1; 1 for padding, so that its sums are certain."""
    q = frames.split(inputs.q[:, :, tokens], 0.0)
    row = frame_above(
        torch.add(frames.key, q, alpha=1 / LN2).amax(-1, keepdim=True)
    )  # (n, B, H, C, 1)
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
            return (
                result if counts is None else result.mul_(counts)
            )  # masked_fill_ takes 20 times as long
        result.mul_(torch.exp2(-sum(frames[1:], frames[0])))
    else:
        far = (
            2 * FAR[x.dtype] + 2**11
        ) * LN2  # -far is 0 even against two frames of -FAR: 2^-2048 is 0 in float64
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
    return (
        direct
        if inside.all()
        else direct.where(inside, mantissa.log() + exponent * _LN2_LOW + exponent * _LN2_HIGH)
    )


def finite(x: Tensor) -> Tensor:
    """`x` with -inf replaced by 0, to avoid -inf - -inf in differences."""
    return torch.where(x == -torch.inf, 0, x)


def _is_small(frame: Tensor) -> bool:
    return bool(frame.abs().amax() < _SMALL)
