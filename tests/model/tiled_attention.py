"""Exact softmax attention from tiles of keys, read one after the other: what fused kernels do, in plain torch.

FlashAttention (Dao et al. 2022, section 3.1) is based on an identity. For a vector x of scores, let

    m(x) = max_i x_i    f(x) = [exp(x_i - m(x))]_i    l(x) = sum_i f(x)_i    softmax(x) = f(x) / l(x)

and for the concatenation of two vectors m, f and l follow from those of the parts:

    m([a, b]) = max(m(a), m(b))    l([a, b]) = exp(m(a) - m) l(a) + exp(m(b) - m) l(b)    f likewise

So no query needs all its scores at once. Training uses torch's kernels; this is a readable equivalent for tests.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Tile(NamedTuple):
    """The part of T queries' attention that comes from some of their keys."""

    m: Tensor
    """(..., T, 1): the largest score; -inf before the first key."""
    f: Tensor
    """(..., T, D): f(x) times the values, a sum over the keys."""
    l: Tensor  # noqa: E741 (the papers' name)
    """(..., T, 1): the sum of f(x)."""

    def merge(self, other: "Tile") -> "Tile":
        """Combine the keys of both. Associative and commutative."""
        m = torch.maximum(self.m, other.m)
        finite = m.masked_fill(m == -torch.inf, 0)  # -inf less -inf would be NaN, and is a weight of 0
        a, b = (self.m - finite).exp(), (other.m - finite).exp()
        return Tile(m, a * self.f + b * other.f, a * self.l + b * other.l)

    @property
    def y(self) -> Tensor:
        """The attention's result, (..., T, D)."""
        return self.f / self.l


def tile_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tile:
    """The tile of queries (..., T, D) and keys (..., S, D); `mask` (T, S) is True where a query may attend.

    `scale` multiplies the scores, 1 / sqrt(D) if None.
    """
    x = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)  # (..., T, S)
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf)
    m = x.amax(-1, keepdim=True).detach()  # y does not depend on m, so it needs no gradient
    f = (x - m.masked_fill(m == -torch.inf, 0)).exp()
    return Tile(m, f @ v, f.sum(-1, keepdim=True))


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, tile: int = 64, scale: float | None = None
) -> Tensor:
    """softmax(q k^T scale) v, from tiles of `tile` queries and keys.

    Tiles that none of their queries may attend to are skipped.

    Args:
        q: (..., T, D).
        k: (..., S, D).
        v: (..., S, D_v).
        causal: query i sees keys j <= i, and S = T.
        scale: as in `tile_of`.

    Returns:
        (..., T, D_v).
    """
    T, S = q.shape[-2], k.shape[-2]
    rows = []
    for i in range(0, T, tile):
        queries = q[..., i : i + tile, :]
        row = None
        for j in range(0, min(i + tile, T) if causal else S, tile):
            keys, values = k[..., j : j + tile, :], v[..., j : j + tile, :]
            mask = _causal_mask(queries, keys) if causal and i == j else None
            part = tile_of(queries, keys, values, mask, scale)
            row = part if row is None else row.merge(part)
        assert row is not None, "attention over no keys"
        rows.append(row.y)
    return torch.cat(rows, dim=-2)


def _causal_mask(queries: Tensor, keys: Tensor) -> Tensor:
    """True where key j <= query i: only the tile on the diagonal needs it."""
    return torch.ones(queries.shape[-2], keys.shape[-2], dtype=torch.bool, device=queries.device).tril()
