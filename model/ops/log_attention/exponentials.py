"""The exponentials of `chunked.py`, relative to the frames of their chunks, so that all are at most 1."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.ops.log_attention.chunks import CHUNK, maxima, split
from model.ops.log_attention.frames import FAR, LN2, finite, frame_above, scaled_exp


class Inputs(NamedTuple):
    """The inputs for some elements of the batch."""

    q: Tensor
    """(B, H, T, d_k)."""
    k: Tensor
    """(B, H, S, d_k)."""
    log_v: Tensor
    """(B, H, S, d_v)."""
    log_s: Tensor
    """(B, H, d_k, E), in the accumulation type."""

    def of(self, batch: slice) -> "Inputs":
        """Select elements of the batch."""
        return Inputs(*(x[batch] for x in self))


class Frames(NamedTuple):
    """Exponents of the powers of two that scale the exponentials of N chunks: whole numbers, 0 where unknown."""

    key: Tensor
    """(N, B, H, 1, d_k); -inf if all keys so far are -inf."""
    value: Tensor
    """(N, B, H, 1, E)."""
    factor: Tensor
    """(N, B, H, d_k, E): from the frame of the previous chunk (or of the state) to this one."""
    C: int | None
    """Tokens of a chunk; None if there is a single chunk."""
    chunks: slice
    """The indices of these chunks."""

    def of(self, chunks: slice) -> "Frames":
        """Select chunks."""
        return Frames(self.key[chunks], self.value[chunks], self.factor[chunks], self.C, chunks)

    def split(self, x: Tensor, fill: float) -> Tensor:
        """Split tokens (B, H, t, D) into these chunks, in the accumulation type: (n, B, H, C, D)."""
        return split(x.to(self.value.dtype), self.C or x.shape[2], fill)


def frames_of(inputs: Inputs, causal: bool) -> Frames:
    """Return the frames of all chunks (one chunk if not causal), including the state's tokens as far as known."""
    C = min(CHUNK, inputs.k.shape[2]) if causal else None
    log_s, log_z = inputs.log_s, inputs.log_s[..., -1]  # (B, H, d_k, E), (B, H, d_k)
    mean = (log_s - finite(log_s[..., -1:])).amax(2)  # (B, H, E): of log_v, over the state's tokens
    k, log_v = (maxima(x, C or x.shape[2]).to(log_s.dtype) for x in (inputs.k, inputs.log_v))
    keys, values = torch.cat([log_z[None], k]), torch.cat([mean[None], pad(log_v, (0, 1))])
    keys, values = (frame_above(x / LN2).cummax(0).values for x in (keys, values))  # (1 + N, B, H, .)
    decay, rescale = (torch.exp2(x[:-1] - finite(x[1:])) for x in (keys, values))  # at most 1
    factor = decay.unsqueeze(-1) * rescale.unsqueeze(-2)
    return Frames(keys[1:].unsqueeze(3), finite(values[1:]).unsqueeze(3), factor, C, slice(None))


def queries(inputs: Inputs, tokens: slice, frames: Frames) -> Tensor:
    """e_q (n, B, H, C, d_k), between 0 and about 1; 1 for padding, so that its sums are certain."""
    q = frames.split(inputs.q[:, :, tokens], 0.0)
    row = frame_above(torch.add(frames.key, q, alpha=1 / LN2).amax(-1, keepdim=True))  # (n, B, H, C, 1)
    far = FAR[q.dtype]
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
