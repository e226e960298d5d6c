"""Sequences as chunks of tokens."""

from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64  # tokens: C x C scores and d_k x d_v states then cost about the same at head sizes from 32 to 128


def split(x: Tensor, C: int, fill: float) -> Tensor:
    """(G, T, D) -> (G, N, C, D), N = ceil(T / C); what is missing of the last chunk is filled."""
    missing = -x.shape[1] % C
    return (pad(x, (0, 0, 0, missing), value=fill) if missing else x).reshape(x.shape[0], -1, C, x.shape[2])


def join(chunks: Tensor, T: int) -> Tensor:
    """Undo `split`: (G, N, C, D) -> (G, T, D)."""
    return chunks.flatten(1, 2)[:, :T]
