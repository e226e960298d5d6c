"""Attention in tiles equals attention at once: the identity that FlashAttention rests on."""

import itertools

import pytest
import torch
from gradients import assert_all_close, with_gradients
from tiled_attention import Tile, tile_of, tiled_attention
from torch.nn.functional import scaled_dot_product_attention


def inputs(T, S=None, D=8, D_v=6, scale=1.0):
    generator = torch.Generator().manual_seed(T)
    shapes = [(2, 3, T, D), (2, 3, S or T, D), (2, 3, S or T, D_v)]
    return [(scale * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_() for shape in shapes]


def dense(q, k, v, causal):
    x = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        x = x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return x.softmax(-1) @ v


@pytest.mark.parametrize("tile", [1, 16, 64, 1000])
@pytest.mark.parametrize(("T", "S", "causal"), [(1, 1, True), (100, 100, True), (65, 65, True), (7, 200, False)])
def test_tiles_equal_the_whole_with_all_gradients(T, S, causal, tile):
    if tile == 1 and T == 100:
        T = S = 20
    leaves = inputs(T, S)
    got = with_gradients(tiled_attention(*leaves, causal=causal, tile=tile), leaves)
    assert_all_close(got, with_gradients(dense(*leaves, causal), leaves))


def test_tiles_equal_the_fused_kernel():
    q, k, v = inputs(130, D_v=8)
    assert_all_close([tiled_attention(q, k, v)], [scaled_dot_product_attention(q, k, v, is_causal=True)])


def test_scores_far_beyond_the_exponentials_range():
    """exp(2000) is infinite in float64: the running maximum keeps every exponent at or below 0."""
    leaves = inputs(70, scale=40.0)
    assert (leaves[0] @ leaves[1].mT).max() / 8**0.5 > 2000
    got = with_gradients(tiled_attention(*leaves, tile=16), leaves)
    # Rounding of a score of 2000 is 2000 times larger.
    assert_all_close(got, with_gradients(dense(*leaves, True), leaves), tolerance=1e-9)


def test_merging_is_associative_and_commutative_and_has_a_neutral_element():
    q, k, v = inputs(5, 12)
    a, b, c = (tile_of(q, k[..., i : i + 4, :], v[..., i : i + 4, :]) for i in (0, 4, 8))
    whole = dense(q, k, v, False)
    for x, y, z in itertools.permutations((a, b, c)):
        assert_all_close([x.merge(y).merge(z).y, x.merge(y.merge(z)).y], [whole, whole])
    nothing = Tile(torch.full_like(a.m, -torch.inf), torch.zeros_like(a.f), torch.zeros_like(a.l))
    assert all(torch.equal(x, y) for x, y in zip(nothing.merge(a), a, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(nothing.merge(nothing), nothing, strict=True))


def test_a_tile_whose_keys_are_all_masked_changes_nothing():
    q, k, v = inputs(5, 12)
    masked = tile_of(q, k, v, torch.zeros(5, 12, dtype=torch.bool))
    seen = tile_of(q, k, v)
    assert all(torch.equal(x, y) for x, y in zip(masked.merge(seen), seen, strict=True))
