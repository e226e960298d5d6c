"""Caches behave as values although they are written in place; states of any kind can be combined and split."""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from model.attention.cache import KVCache, SparseCache
from model.ops.sparse_attention.patterns import fixed, longformer, pattern_mask, strided, window
from model.position import Rotation, rotate
from model.state_trees import cat_states, select_rows

H, D, E = 2, 3, 4
PATTERNS = {
    "window": [window(7)],
    "heads": [window(3), window(4, 2)],
    "global": [longformer(5, 3)],
    "strided": [strided(6, "A1"), strided(6, "A2")],
    "fixed": [fixed(8, 3, "A1"), fixed(8, 3, "A2")],
    "fixed, merged": [fixed(8, 3)],
}
each_pattern = pytest.mark.parametrize("patterns", PATTERNS.values(), ids=PATTERNS)


def kv(T, B=2, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, T, d, generator=generator, dtype=torch.float64, **options) for d in (D, E))


@pytest.fixture(params=["grad", "inference"])
def mode(request):
    """With and without autograd: a cache is written in place only if autograd is off."""
    context = {"grad": torch.enable_grad, "inference": torch.inference_mode}[request.param]
    with context():
        yield request.param


def in_pieces(k, v, pieces, *patterns):
    """The cache after a text that comes in pieces: of all tokens, or of those that these patterns need."""
    first, *others = zip(k.split(pieces, dim=2), v.split(pieces, dim=2), strict=True)
    cache = (SparseCache if patterns else KVCache).of(*first, *patterns)
    for piece in others:
        cache, *_ = cache.append(*piece, *patterns)
    return cache


def needed(patterns, n):
    """Positions of the first n tokens that a later one may see, by the definition: of many later ones, any."""
    return pattern_mask(patterns, torch.arange(n, n + 200), torch.arange(n)).any(0).any(0).nonzero().flatten()


@pytest.mark.parametrize("pieces", [[1] * 100, [63, 1, 1, 35]])
def test_a_cache_in_pieces_is_the_whole(mode, pieces):
    k, v = kv(100)
    cache = in_pieces(k, v, pieces)
    assert torch.equal(cache.k, k)
    assert torch.equal(cache.v, v)
    assert cache.lengths == (100, 100)


@each_pattern
@pytest.mark.parametrize("n", [1, 23, 100])
def test_of_a_text_read_at_once_is_kept_what_some_later_token_sees(mode, patterns, n):
    k, v = kv(n)
    cache, kept = SparseCache.of(k, v, patterns), needed(patterns, n)
    assert cache.place.tolist() == [[(1 + kept).tolist()]] * 2
    assert torch.equal(cache.k, k[:, :, kept])
    assert torch.equal(cache.v, v[:, :, kept])
    assert cache.k.untyped_storage().nbytes() <= 8 * 2 * H * D * max(2 * 64, len(kept))  # a short text's buffer


@each_pattern
@pytest.mark.parametrize("pieces", [[1] * 150, [3, 140, 7]])
def test_of_a_text_in_pieces_all_that_later_tokens_see_is_kept_and_little_else(mode, patterns, pieces):
    k, v = kv(150)
    cache, kept = in_pieces(k, v, pieces, patterns), needed(patterns, 150)
    place = cache.place[0, 0] - 1
    assert set(kept.tolist()) <= set(place.tolist())
    assert torch.equal(cache.k, k[:, :, place])
    assert torch.equal(cache.v, v[:, :, place])
    assert cache.lengths == (150, 150)
    assert len(place) <= len(kept) + 64


@pytest.mark.parametrize(
    ("patterns", "seldom", "columns"),
    [
        (None, 6, 4 * 1001),  # 64 columns, doubled up to 2,048
        ([window(17)], 1000 // (64 - 16) + 1, 64),  # 64 columns, of which 16 are kept
        ([fixed(16, 1)], 3 * (1000 // 64) + 1, 2 * (1000 // 16 + 64)),  # a copy every 64, a buffer for it, a larger one
    ],
    ids=["all", "window", "fixed"],
)
def test_a_step_writes_in_place_and_memory_is_taken_seldom(patterns, seldom, columns):
    rest = () if patterns is None else (patterns,)
    with torch.inference_mode():
        cache = in_pieces(*kv(1), [1], *rest)
        places, most = [], 0
        for seed in range(1000):
            cache, *_ = cache.append(*kv(1, seed=seed), *rest)
            places.append(cache.k.untyped_storage().data_ptr())
            most = max(most, cache.k.untyped_storage().nbytes())
    taken = 1 + sum(a != b for a, b in itertools.pairwise(places))
    assert taken <= seldom
    assert most <= 8 * 2 * H * D * columns


def test_gradients_go_through_a_cache():
    k, v = kv(6, requires_grad=True)
    in_pieces(k, v, [4, 1, 1]).k.sum().backward()
    in_pieces(k, v, [4, 1, 1], [window(3)]).v.sum().backward()
    assert torch.equal(k.grad, torch.ones_like(k))
    assert v.grad[0, 0, :, 0].tolist() == [0, 0, 0, 0, 1, 1]
    in_pieces(k, v, [4, 1, 1], [fixed(4, 1)]).v.sum().backward()
    assert v.grad[0, 0, :, 0].tolist() == [0, 0, 0, 1, 2, 2]


@each_pattern
@pytest.mark.parametrize("T", [1, 9, 70])
def test_columns_are_where_they_say_in_rows_of_any_length(mode, patterns, T):
    """They include every key that the T new tokens may see."""
    lengths = (2, 31, 5)
    texts = [kv(n + T, B=1, seed=n) for n in lengths]
    caches = [SparseCache.of(k[:, :, :n], v[:, :, :n], patterns) for (k, v), n in zip(texts, lengths, strict=True)]
    new = [torch.cat([text[i][:, :, -T:] for text in texts]) for i in range(2)]
    after, k_all, v_all, where = cat_states(caches).append(*new, patterns)
    assert after.lengths == tuple(n + T for n in lengths)
    for row, n in enumerate(lengths):
        there = where[row] >= 0
        for found, text in zip((k_all, v_all), texts[row], strict=True):
            assert torch.equal(found[row, :, there], text[0, :, where[row, there]])
        seen = pattern_mask(patterns, torch.arange(n, n + T), torch.arange(n + T)).any(0).any(0).nonzero().flatten()
        assert set(seen.tolist()) <= set(where[row].tolist())
        assert len(set(where[row, there].tolist())) == there.sum()


def test_one_token_after_rows_of_the_same_length_needs_no_mask(mode):
    assert KVCache.of(*kv(5)).append(*kv(1))[3] is None


class Sums(NamedTuple):
    S: Tensor
    seen: tuple[int, ...]
    inner: KVCache | None


def test_states_are_put_together_and_taken_apart():
    a = (Sums(torch.ones(1, 2), (4,), KVCache.of(*kv(4, B=1))), None)
    b = (Sums(torch.zeros(2, 2), (6, 6), KVCache.of(*kv(6, B=2))), None)
    both, nothing = cat_states([a, b])
    assert nothing is None
    assert both.seen == (4, 6, 6)
    assert both.S.tolist() == [[1, 1], [0, 0], [0, 0]]
    assert both.inner.lengths == (4, 6, 6)
    assert (both.inner.k[0, :, :2] == 0).all()
    assert torch.equal(both.inner.k[0, :, 2:], a[0].inner.k[0])
    swapped, _ = select_rows((both, nothing), [2, 0, 0])
    assert swapped.seen == (6, 4, 4)
    assert torch.equal(swapped.inner.v, both.inner.v[[2, 0, 0]])


def test_a_rotation_turns_rows_at_positions_of_their_own():
    angle = torch.rand(2, 5, 2, dtype=torch.float64)
    x = torch.rand(2, 3, 5, 4, dtype=torch.float64)
    together = rotate(x, Rotation(angle.cos(), angle.sin()))
    for row in range(2):
        assert torch.equal(together[row], rotate(x[row : row + 1], Rotation(angle[row].cos(), angle[row].sin()))[0])
