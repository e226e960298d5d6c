"""The identity that FlashAttention rests on: exact softmax attention from tiles of keys, read one after the other.

FlashAttention (Dao et al. 2022, section 3.1): for a vector x of scores, let

    m(x) = max_i x_i    f(x) = [exp(x_i - m(x))]_i    l(x) = sum_i f(x)_i    softmax(x) = f(x) / l(x)

and for the concatenation of two vectors m, f and l follow from those of the parts:

    m([a, b]) = max(m(a), m(b))    l([a, b]) = exp(m(a) - m) l(a) + exp(m(b) - m) l(b)    f likewise

So no query needs all its scores at once. Training uses torch's kernels, which are compared with this.
"""

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from gradients import assert_all_close, with_gradients
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Tile(NamedTuple):
    """The part of T queries' attention that comes from some of their keys."""

    m: Tensor
    """(..., T, 1): the largest score; -inf before the first key."""
    f: Tensor
    """(..., T, D): f(x) times the values, a sum over the keys."""
    l: Tensor  # noqa: E741 (the papers' name)
    """(..., T, 1): the sum of f(x)."""

    def merge(self, other: "Tile") -> "Tile":
        m = torch.maximum(self.m, other.m)
        a, b = (_weights(x.m, m) for x in (self, other))
        return Tile(m, a * self.f + b * other.f, a * self.l + b * other.l)


def _weights(x, m):
    """exp(x - m), with the weight 0 where there is no score yet."""
    return (x - m.masked_fill(m == -torch.inf, 0)).exp()


def tile_of(q, k, v, mask):
    """The tile of queries (..., T, D) and keys (..., S, D); `mask` (T, S) is True where a query may attend."""
    x = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    m = x.amax(-1, keepdim=True).detach()  # the result does not depend on m, so it needs no gradient
    f = _weights(x, m)
    return Tile(m, f @ v, f.sum(-1, keepdim=True))


def tiles_of(q, k, v, mask, size):
    return [tile_of(q, *parts) for parts in zip(k.split(size, 2), v.split(size, 2), mask.split(size, 1), strict=True)]


def inputs(T, S, scale=1.0):
    generator = torch.Generator().manual_seed(T)
    shapes = [(2, 3, n, 8) for n in (T, S, S)]
    return [(scale * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("T", "S", "size", "scale"), [(1, 1, 64, 1), (20, 20, 1, 1), (65, 65, 16, 40), (7, 200, 64, 1)]
)
def test_tiles_equal_the_fused_kernel_with_all_gradients_far_beyond_the_range_of_exponentials(T, S, size, scale):
    """exp(2000) is infinite in float64: the running maximum keeps every exponent at or below 0."""
    leaves, causal = inputs(T, S, scale), T == S
    mask = torch.ones(T, S, dtype=torch.bool).tril() if causal else torch.ones(T, S, dtype=torch.bool)
    _, f, sums = functools.reduce(Tile.merge, tiles_of(*leaves, mask, size))
    wanted = scaled_dot_product_attention(*leaves, is_causal=causal)
    assert scale == 1 or (leaves[0] @ leaves[1].mT).max() / 8**0.5 > 2000
    # Rounding of a score of 2000 is 2000 times larger.
    assert_all_close(*(with_gradients(y, leaves) for y in (f / sums, wanted)), tolerance=1e-12 * scale**2)


def test_merging_is_associative_and_commutative_and_has_a_neutral_element():
    leaves, everything = inputs(5, 12), torch.ones(5, 12, dtype=torch.bool)
    wanted = scaled_dot_product_attention(*leaves)
    for x, y, z in itertools.permutations(tiles_of(*leaves, everything, 4)):
        for _, f, sums in (x.merge(y).merge(z), x.merge(y.merge(z))):
            assert_all_close([f / sums], [wanted])
    seen, nothing = tile_of(*leaves, everything), tile_of(*leaves, ~everything)  # all keys are masked
    assert all(torch.equal(x, y) for x, y in zip(nothing.merge(seen), seen, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(nothing.merge(nothing), nothing, strict=True))
