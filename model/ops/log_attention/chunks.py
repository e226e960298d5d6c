"""Sequences (B, H, T, D) as chunks of tokens (N, B, H, C, D), so that a loop over chunks reads memory in order."""

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64  # tokens: C x C scores and d_k x d_v states then cost about the same at head sizes from 32 to 128


def split(x: Tensor, C: int, fill: float) -> Tensor:
    """(B, H, T, D) -> (N, B, H, C, D), N = ceil(T / C): a view, unless the last chunk must be padded."""
    missing = -x.shape[2] % C
    if missing:
        x = pad(x, (0, 0, 0, missing), value=fill)
    return x.unflatten(2, (-1, C)).permute(2, 0, 1, 3, 4)


def join(chunks: Tensor, T: int) -> Tensor:
    """Undo `split`: (N, B, H, C, D) -> (B, H, T, D)."""
    return chunks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :T]


def write(place: Tensor, chunks: Tensor) -> None:
    """Copy (N, B, H, C, D) to place (B, H, T, D)."""
    C = chunks.shape[3]
    N, rest = divmod(place.shape[2], C)
    split(place[:, :, : N * C], C, 0.0).copy_(chunks[:N])
    if rest:
        place[:, :, N * C :].copy_(chunks[N, :, :, :rest])


def maxima(x: Tensor, C: int) -> Tensor:
    """Maximum of each chunk and feature: (B, H, T, D) -> (N, B, H, D)."""
    N, rest = divmod(x.shape[2], C)
    parts = [split(x[:, :, : N * C], C, 0.0).amax(3)] if N else []
    return torch.cat([*parts, x[:, :, N * C :].amax(2).unsqueeze(0)] if rest else parts)
