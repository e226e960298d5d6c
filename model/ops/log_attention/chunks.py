"""Sequences (B, H, T, D) as chunks of tokens (N, B, H, C, D), so that a loop over chunks reads memory in order."""

from collections.abc import Iterator

import torch
from torch import Tensor

from model.ops.custom import accumulation_dtype, in_chunks

CHUNK = 64  # tokens: C x C scores and d_k x d_v states then cost about the same at head sizes from 32 to 128
# Elements of a temporary on a CPU, so that a step fits into its cache. Other devices process all chunks at once.
BLOCK = 2**19


def split(x: Tensor, C: int, fill: float) -> Tensor:
    """(B, H, T, D) -> (N, B, H, C, D), N = ceil(T / C): a view, unless the last chunk must be padded."""
    return in_chunks(x, C, fill).permute(2, 0, 1, 3, 4)


def write(place: Tensor, chunks: Tensor) -> None:
    """Copy (N, B, H, C, D) to place (B, H, T, D)."""
    C = chunks.shape[3]
    N, rest = divmod(place.shape[2], C)
    split(place[:, :, : N * C], C, 0.0).copy_(chunks[:N])
    if rest:
        place[:, :, N * C :].copy_(chunks[N, :, :, :rest])


def maxima(x: Tensor, C: int) -> Tensor:
    """Maximum of each chunk and feature: (B, H, T, D) -> (N, B, H, D)."""
    if x.device.type == "cpu":  # where maxima of shorter types are slow
        x = x.to(accumulation_dtype(x))
    N, rest = divmod(x.shape[2], C)
    parts = [split(x[:, :, : N * C], C, 0.0).amax(3)] if N else []
    return torch.cat([*parts, x[:, :, N * C :].amax(2).unsqueeze(0)] if rest else parts)


def block_chunks(x: Tensor) -> int:
    """Return the chunks of x (B, H, T, D) in a block. On CPUs they depend only on H and D, the same in both passes."""
    _, H, T, D = x.shape
    return max(1, BLOCK // (H * CHUNK * D)) if x.device.type == "cpu" else -(-T // CHUNK)


def batches(x: Tensor) -> Iterator[slice]:
    """Yield elements of the batch, as many at a time as fit into a block."""
    B, N = len(x), -(-x.shape[2] // CHUNK)
    step = max(1, block_chunks(x) // N) if x.device.type == "cpu" else B
    return (slice(b, min(b + step, B)) for b in range(0, B, step))


def blocks(x: Tensor) -> list[tuple[slice, slice]]:
    """Return the tokens and the chunks of each block of x (B, H, T, D)."""
    T, step = x.shape[2], block_chunks(x)
    N = -(-T // CHUNK)
    return [
        (slice(CHUNK * n, min(CHUNK * (n + step), T)), slice(n, min(n + step, N)))
        for n in range(0, N, step)
    ]
