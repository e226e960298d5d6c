"""Sequences (B, H, T, D) as chunks of tokens (N, B, H, C, D), so that a loop over chunks reads
memory in order."""

from collections.abc import Iterator

import torch
from torch import Tensor

from common.numbers import ceil_div
from model.ops.custom import accumulation_dtype, in_chunks

# Tokens: C x C scores and d_k x d_v states then cost about the same at head sizes from 32 to 128.
CHUNK = 64
# Elements of a temporary on a CPU, so that a step fits into its cache. Other devices process all
# chunks at once.
STEP = 2**19


def split(x: Tensor, C: int, fill: float) -> Tensor:
    """(B, H, T, D) -> (N, B, H, C, D), N = ceil(T / C): a view, unless a chunk must be padded."""
    return in_chunks(x, C, fill).permute(2, 0, 1, 3, 4)


def write(destination: Tensor, chunks: Tensor) -> None:
    """Copy (N, B, H, C, D) to destination (B, H, T, D)."""
    C = chunks.shape[3]
    N, rest = divmod(destination.shape[2], C)
    split(destination[:, :, : N * C], C, 0.0).copy_(chunks[:N])
    if rest:
        destination[:, :, N * C :].copy_(chunks[N, :, :, :rest])


def maxima(x: Tensor, C: int) -> Tensor:
    """Maximum of each chunk and feature: (B, H, T, D) -> (N, B, H, D)."""
    if x.device.type == "cpu":  # where maxima of shorter types are slow
        x = x.to(accumulation_dtype(x))
    N, rest = divmod(x.shape[2], C)
    chunk_maxima = []
    if N:
        chunk_maxima.append(split(x[:, :, : N * C], C, 0.0).amax(3))
    if rest:
        chunk_maxima.append(x[:, :, N * C :].amax(2).unsqueeze(0))
    return torch.cat(chunk_maxima)


def step_chunks(x: Tensor) -> int:
    """Return the chunks of x (B, H, T, D) in a step.

    On CPUs they depend only on H and D, so both passes have the same.
    """
    _, H, T, D = x.shape
    if x.device.type != "cpu":
        return ceil_div(T, CHUNK)
    return max(1, STEP // (H * CHUNK * D))


def batches(x: Tensor) -> Iterator[slice]:
    """Yield elements of the batch, as many at a time as fit into a step."""
    B = len(x)
    size = B
    if x.device.type == "cpu":
        size = max(1, step_chunks(x) // ceil_div(x.shape[2], CHUNK))
    for start in range(0, B, size):
        yield slice(start, min(start + size, B))


def steps(x: Tensor) -> list[tuple[slice, slice]]:
    """Return the tokens and the chunks of each step of x (B, H, T, D)."""
    T = x.shape[2]
    N = ceil_div(T, CHUNK)
    size = step_chunks(x)
    slices = []
    for first in range(0, N, size):
        stop = first + size
        tokens = slice(CHUNK * first, min(CHUNK * stop, T))
        slices.append((tokens, slice(first, min(stop, N))))
    return slices
