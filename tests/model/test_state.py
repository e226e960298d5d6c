"""Caches are values although they are written in place, and states of any kind are put together and taken apart."""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from model.attention.cache import KVCache, RingCache, positions
from model.position import Rotation, rotate
from model.state import cat_states, select_rows

H, D, E = 2, 3, 4


def kv(T, B=2, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, T, d, generator=generator, dtype=torch.float64, **options) for d in (D, E))


def seen(cache, row):
    """A row's own columns, for comparing."""
    n = min(cache.lengths[row], cache.k.shape[2])
    return (cache.k[row, :, cache.k.shape[2] - n :], cache.v[row, :, cache.v.shape[2] - n :])


@pytest.fixture(params=["grad", "no_grad", "inference"])
def mode(request):
    """What autograd does: a cache is written in place only where it does nothing."""
    context = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[request.param]
    with context():
        yield request.param


def in_pieces(cls, k, v, pieces, *window):
    first, *others = zip(k.split(pieces, dim=2), v.split(pieces, dim=2), strict=True)
    cache = cls.of(*first, *window)
    for piece in others:
        cache, *_ = cache.append(*piece)
    return cache


@pytest.mark.parametrize("pieces", [[100], [1] * 100, [63, 1, 1, 35], [3, 90, 7]])
def test_a_cache_in_pieces_is_the_whole(mode, pieces):
    k, v = kv(100)
    cache = in_pieces(KVCache, k, v, pieces)
    assert torch.equal(cache.k, k)
    assert torch.equal(cache.v, v)
    assert cache.lengths == (100, 100)
    ring = in_pieces(RingCache, k, v, pieces, 7)
    assert torch.equal(ring.k, k[:, :, -7:])
    assert torch.equal(ring.v, v[:, :, -7:])
    assert ring.lengths == (100, 100)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_an_earlier_cache_stays_what_it_was(mode, window):
    """It is continued twice, in two ways, and so is what came of it."""
    rest = () if window is None else (window,)
    cls = RingCache if window else KVCache
    start = cls.of(*kv(3), *rest)
    branches = {(): start}
    for depth in range(4):
        for path in [path for path in branches if len(path) == depth]:
            for seed in (1, 2):
                branches[*path, seed] = branches[path].append(*kv(1 + 30 * depth, seed=seed))[0]
    for path, cache in branches.items():
        whole = [kv(3)] + [kv(1 + 30 * depth, seed=seed) for depth, seed in enumerate(path)]
        k, v = (torch.cat(parts, dim=2) for parts in zip(*whole, strict=True))
        n = min(window or k.shape[2], k.shape[2])
        for row in range(2):
            assert torch.equal(seen(cache, row)[0], k[row, :, -n:])
            assert torch.equal(seen(cache, row)[1], v[row, :, -n:])


@pytest.mark.parametrize("window", [None, 16])
def test_a_step_writes_in_place_and_memory_is_taken_seldom(window):
    with torch.inference_mode():
        cache = RingCache.of(*kv(1), 16) if window else KVCache.of(*kv(1))
        places = []
        for seed in range(1000):
            cache, *_ = cache.append(*kv(1, seed=seed))
            places.append(cache.k.untyped_storage().data_ptr())
    taken = 1 + sum(a != b for a, b in itertools.pairwise(places))
    assert taken <= (1000 // (64 - 16) + 1 if window else 6)  # 64 columns, of which 16 are kept; 64, doubled: 2048
    assert cache.k.untyped_storage().nbytes() <= 8 * 2 * H * D * (64 if window else 4 * 1001)


def test_a_cache_made_in_inference_mode_goes_on_outside_of_it():
    with torch.inference_mode():
        cache = KVCache.of(*kv(3))
    with torch.no_grad():
        after, *_ = cache.append(*kv(2, seed=1))
    assert torch.equal(after.k, torch.cat([kv(3)[0], kv(2, seed=1)[0]], dim=2))


def test_gradients_go_through_a_cache():
    k, v = kv(6, requires_grad=True)
    in_pieces(KVCache, k, v, [4, 1, 1]).k.sum().backward()
    in_pieces(RingCache, k, v, [4, 1, 1], 3).v.sum().backward()
    assert torch.equal(k.grad, torch.ones_like(k))
    assert v.grad[0, 0, :, 0].tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("window", [None, 1, 4, 12])
@pytest.mark.parametrize("T", [1, 2, 9])
def test_masks_and_positions_are_their_definition_in_rows_of_any_length(mode, window, T):
    """Each column holds its position's token, and a mask shows a query just the tokens that it may see."""
    lengths = (2, 11, 5)
    texts = [kv(n + T, B=1, seed=n) for n in lengths]
    cls, rest = (KVCache, ()) if window is None else (RingCache, (window,))
    state = cat_states([cls.of(k[:, :, :n], v[:, :, :n], *rest) for (k, v), n in zip(texts, lengths, strict=True)])
    new = [torch.cat([text[i][:, :, -T:] for text in texts]) for i in range(2)]
    after, k_all, _, mask = state.append(*new)
    assert after.lengths == tuple(n + T for n in lengths)
    where = positions(after.lengths, k_all.shape[2])  # (B, S)
    mask = torch.ones(3, 1, T, k_all.shape[2], dtype=torch.bool) if mask is None else mask.expand(3, 1, -1, -1)
    for row, n in enumerate(lengths):
        for i in range(T):
            allowed = where[row, mask[row, 0, i]].tolist()
            assert allowed == [j for j in range(n + i + 1) if window is None or n + i - j < window]
            assert torch.equal(k_all[row, :, mask[row, 0, i]], texts[row][0][0, :, allowed])


def test_one_token_after_rows_of_the_same_length_needs_no_mask(mode):
    assert KVCache.of(*kv(5)).append(*kv(1))[3] is None
    assert RingCache.of(*kv(5), 4).append(*kv(1))[3] is None
    assert RingCache.of(*kv(2), 4).append(*kv(1))[3] is not None  # columns in front are empty


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


def test_states_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="no states"):
        cat_states([])
    with pytest.raises(ValueError, match="states of different kinds: KVCache, NoneType"):
        cat_states([KVCache.of(*kv(1)), None])


def test_a_rotation_turns_rows_at_positions_of_their_own():
    angle = torch.rand(2, 5, 2, dtype=torch.float64)
    x = torch.rand(2, 3, 5, 4, dtype=torch.float64)
    together = rotate(x, Rotation(angle.cos(), angle.sin()))
    for row in range(2):
        assert torch.equal(together[row], rotate(x[row : row + 1], Rotation(angle[row].cos(), angle[row].sin()))[0])
