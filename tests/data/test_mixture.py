from fractions import Fraction

import numpy as np
import pytest

from common.settings import UserError
from data.loader import TrainBatches, open_rows
from data.mixture import Mixture, compute_owners, order_fairly

SIZES = [700, 250, 49, 1]
OWNERS = np.random.default_rng(0).permutation(np.repeat(np.arange(4, dtype=np.uint8), SIZES))
"""1000 windows of four sets, scattered."""


def mix(weights, seed=0):
    return Mixture(OWNERS, list("abcd"), weights, seed)


def assert_shares_are_kept(sets, shares):
    """After any number of draws, from the first, no set's count is 1 or more off its share."""
    n = np.arange(1, sets.size + 1)
    for number, share in enumerate(shares):
        counts = np.cumsum(sets == number)
        # In whole numbers: n x share in floating point could be off by what is tested.
        distance = np.abs(counts * share.denominator - n * share.numerator)
        assert distance.max() < share.denominator, number


@pytest.mark.parametrize("parts", [[3], [1, 1], [1, 2, 4], [0, 5, 0, 2], [1, 1, 1, 97], [1] * 22, [1, 10, 100, 1000]])
def test_every_share_is_kept_after_any_number_of_draws(parts):
    order, rank = order_fairly(parts)
    assert np.bincount(order, minlength=len(parts)).tolist() == parts
    assert_shares_are_kept(np.tile(order, 3), [Fraction(part, sum(parts)) for part in parts])
    for number, part in enumerate(parts):
        assert rank[order == number].tolist() == list(range(part))


@pytest.mark.parametrize("weights", [{}, {"a": 2, "c": 7.5}])
def test_every_window_of_a_set_comes_once_before_any_comes_again(weights):
    windows = mix(weights, seed=3).rows(np.arange(20_000))
    for number, size in enumerate(SIZES):
        drawn = windows[OWNERS[windows] == number]
        epochs = drawn[: drawn.size // size * size].reshape(-1, size)
        assert len(epochs) > 2
        for epoch in epochs:
            assert np.array_equal(np.sort(epoch), np.flatnonzero(number == OWNERS))
        if size > 10:
            assert not np.array_equal(epochs[0], epochs[1])


def test_a_step_far_away_needs_none_before_it():
    weights = {"a": 2, "c": 0.1}
    sequences = 10**12 + 12_345 + np.arange(4096)
    far = mix(weights).rows(sequences)
    assert far.min() >= 0
    assert far.max() < OWNERS.size
    assert np.array_equal(far[1000:], mix(weights).rows(sequences[1000:]))


@pytest.mark.parametrize("seq_len", [1, 3, 10, 64, 1000])
@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_a_window_belongs_to_the_set_of_most_of_its_tokens(seq_len, at_once):
    rng = np.random.default_rng(seq_len)
    sizes = np.floor(10 ** rng.uniform(0, 2.5, 300)).astype(int)
    sets = rng.integers(0, 5, 300)
    ends = np.cumsum(sizes)
    n_windows = (int(ends[-1]) - 1) // seq_len
    documents = [(ends[i : i + at_once], sets[i : i + at_once]) for i in range(0, 300, at_once)]
    owners = compute_owners(documents, 5, n_windows, seq_len)
    of_tokens = np.repeat(sets, sizes)[: n_windows * seq_len].reshape(n_windows, seq_len)
    counts = np.stack([(of_tokens == number).sum(1) for number in range(5)], axis=1)
    assert np.array_equal(owners, 4 - counts[:, ::-1].argmax(1))  # of equals, the last


@pytest.mark.parametrize(("shard_tokens", "weight"), [(50, 3), (333, 1 / 3), (10**9, 1e-3)])
def test_a_mixture_of_a_dataset(make_stream, shard_tokens, weight):
    rng = np.random.default_rng(1)
    sets = rng.integers(0, 2, 400).tolist()
    # Each token is the number of its set.
    documents = [np.full(size, number) for size, number in zip(rng.integers(1, 60, 400), sets, strict=True)]
    stream = make_stream(*documents, sets=sets, set_names="ABC", shard_tokens=shard_tokens)
    batches = TrainBatches(open_rows(stream, 16), batch_size=4000, seed=0)
    batches.mix({"A": weight})
    is_b = np.concatenate(documents)[: 16 * len(batches.rows)].reshape(-1, 16).mean(axis=1) >= 0.5
    share_of_b = is_b.sum() / (is_b.sum() + weight * (~is_b).sum())
    drawn = batches.batch(0)[0].mean(axis=1) >= 0.5
    assert abs(drawn.sum() - 4000 * share_of_b) < 1
    shares = [batches.batch(11, 0, 1000), batches.batch(11, 1000, 4000)]
    assert np.array_equal(np.concatenate(shares, axis=1), batches.batch(11))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"A": 2, "Pile-C": 1}, "'Pile-C', which is not a set of dataset_dir=.*: its sets are A, B, tiny$"),
        ({"tiny": 2}, "'tiny' the weight 2, but no window consists mostly of it"),
        ({"A": 0, "B": 0}, "leaves nothing to train on"),
    ],
)
def test_a_mixture_that_cannot_be(make_stream, weights, message):
    documents = [[1] * 100, [1] * 50, [1], [1] * 20]
    names = ["A", "B", "tiny"]
    stream = make_stream(*documents, sets=[0, 1, 2, 0], set_names=names)
    batches = TrainBatches(open_rows(stream, 10), batch_size=8, seed=0)
    with pytest.raises(UserError, match=message):
        batches.mix(weights)
    batches.mix({"tiny": 0})
    assert batches.mixture.quotas[2] == 0
