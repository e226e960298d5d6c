import itertools
from fractions import Fraction

import numpy as np
import pytest
from shard_files import write_shards

from common.settings import UserError
from data.loader import TrainBatches, open_rows
from data.mixture import Mixture, fair_order, owners_of_windows
from data.shards import Counts, Manifest, Split, TokenizerId, TokenStream

SIZES = [700, 250, 49, 1]


@pytest.fixture
def owners():
    """1000 windows of four sets, scattered."""
    return np.random.default_rng(0).permutation(np.repeat(np.arange(4, dtype=np.uint8), SIZES))


@pytest.fixture
def dataset(tmp_path):
    """Writes a dataset of documents given as (set, tokens); returns its folder and its manifest."""

    def make(documents, shard_tokens=10**9, val=()):
        names = list(dict.fromkeys(name for name, _ in [*documents, *val]))
        splits = {}
        for split, members in (("train", documents), ("val", val)):
            texts = [np.full(tokens, number % 1000) for number, (_, tokens) in enumerate(members, start=1)]
            numbers = [names.index(name) for name, _ in members]
            shards = write_shards(tmp_path, split, texts, 1000, shard_tokens, numbers)
            sets = {}
            for name in names:
                mine = [tokens for other, tokens in members if other == name]
                if mine:
                    sets[name] = Counts(tokens=sum(mine), documents=len(mine), utf8_bytes=sum(mine))
            splits[split] = Split(sets=sets, shards=shards)
        return tmp_path, Manifest(
            tokenizer=TokenizerId(name="bytes", n_vocab=1000, sha256="0" * 64, eot_id=999),
            inputs=["corpus"],
            set_names=names,
            splits=splits,
            skipped={},
            prepared={},
        )

    return make


def sets_of(mixture, sequences):
    """The set of each sequence of the run, counted from its first."""
    return mixture._order[sequences % mixture._order.size]


def assert_shares_are_kept(sets, shares):
    """After any number of draws, from the first, no set's count is 1 or more off its share."""
    n = np.arange(1, sets.size + 1)
    for number, share in enumerate(shares):
        counts = np.cumsum(sets == number)
        # in whole numbers, as n x share in floating point could be off by the very thing that is tested
        assert np.abs(counts * share.denominator - n * share.numerator).max() < share.denominator, number


@pytest.mark.parametrize(
    "parts",
    [[1], [3], [1, 1], [1, 2, 4], [0, 5, 0, 2], [1, 1, 1, 97], [1] * 22, [50, 33, 17], [1, 10, 100, 1000], [499, 501]],
)
def test_every_share_is_kept_after_any_number_of_draws(parts):
    order, rank = fair_order(parts)
    assert np.bincount(order, minlength=len(parts)).tolist() == parts
    shares = [Fraction(part, sum(parts)) for part in parts]
    assert_shares_are_kept(np.tile(order, 3), shares)
    for number, part in enumerate(parts):
        assert rank[order == number].tolist() == list(range(part))


@pytest.mark.parametrize(
    "weights", [{}, {"a": 2}, {"a": 0.5, "c": 3}, {"d": 10, "b": 0}, {"a": 0, "b": 0}, {"a": 1 / 3, "b": 1e-3}]
)
@pytest.mark.slow
def test_weights_multiply_natural_shares(owners, weights):
    mixture = Mixture(owners, list("abcd"), weights, seed=0)
    sequences = np.arange(50_000)
    drawn = owners[mixture.rows(sequences)]
    assert np.array_equal(drawn, sets_of(mixture, sequences))
    amounts = [Fraction(str(weights.get(name, 1))) * size for name, size in zip("abcd", SIZES, strict=True)]
    shares = [amount / sum(amounts) for amount in amounts]
    if weights != {"a": 1 / 3, "b": 1e-3}:  # has no small denominator
        assert_shares_are_kept(drawn, shares)
    for number, share in enumerate(shares):
        assert abs((drawn == number).sum() - sequences.size * share) < 1


@pytest.mark.parametrize("weights", [{}, {"a": 2, "c": 7.5}])
def test_every_window_of_a_set_comes_once_before_any_comes_again(owners, weights):
    windows = Mixture(owners, list("abcd"), weights, seed=3).rows(np.arange(20_000))
    for number, size in enumerate(SIZES):
        own = windows[owners[windows] == number]
        epochs = [own[i * size : (i + 1) * size] for i in range(own.size // size)]
        assert len(epochs) > 2
        for epoch in epochs:
            assert np.array_equal(np.sort(epoch), np.flatnonzero(owners == number))
        if size > 10:
            assert not np.array_equal(epochs[0], epochs[1])


def test_a_step_far_away_needs_none_before_it(owners):
    weights = {"a": 2, "c": 0.1}
    mixture = Mixture(owners, list("abcd"), weights, seed=0)
    begin = 10**12 + 12_345
    far = mixture.rows(begin + np.arange(4096))
    anew = Mixture(owners, list("abcd"), weights, seed=0)
    assert np.array_equal(far[1000:], anew.rows(begin + np.arange(1000, 4096)))
    assert far.min() >= 0
    assert far.max() < owners.size
    one_by_one = [mixture.rows(np.array([begin + i])).item() for i in range(50)]
    assert one_by_one == far[:50].tolist()


@pytest.mark.parametrize("seq_len", [1, 3, 10, 64, 1000])
@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_a_window_belongs_to_the_set_of_most_of_its_tokens(seq_len, at_once):
    rng = np.random.default_rng(seq_len)
    sizes = np.floor(10 ** rng.uniform(0, 2.5, 300)).astype(int)
    sets = rng.integers(0, 5, 300)
    ends = np.cumsum(sizes)
    n_windows = (int(ends[-1]) - 1) // seq_len
    pieces = [(ends[i : i + at_once], sets[i : i + at_once]) for i in range(0, 300, at_once)]
    owners = owners_of_windows(pieces, 5, n_windows, seq_len)
    of_tokens = np.repeat(sets, sizes)[: n_windows * seq_len].reshape(n_windows, seq_len)
    counts = np.stack([(of_tokens == number).sum(1) for number in range(5)], axis=1)
    assert np.array_equal(owners, 4 - counts[:, ::-1].argmax(1))  # of equals, the last


@pytest.mark.parametrize("shard_tokens", [50, 333, 10**9])
def test_a_mixture_of_a_dataset(dataset, shard_tokens):
    rng = np.random.default_rng(1)
    documents = [("AB"[n], size) for n, size in rng.integers((0, 1), (2, 60), (400, 2)).tolist()]
    folder, manifest = dataset(documents, shard_tokens, val=[("C", 5)])
    seq_len = 16
    batches = TrainBatches(open_rows(TokenStream(folder, manifest, "train"), seq_len), batch_size=8, seed=0)
    batches.mix({"A": 3})
    of_tokens = np.repeat([manifest.set_names.index(name) for name, _ in documents], [size for _, size in documents])
    sequences = np.arange(4000)
    drawn = sets_of(batches.mixture, sequences)
    for window, number in zip(batches.mixture.rows(sequences).tolist(), drawn.tolist(), strict=True):
        inside = of_tokens[window * seq_len : (window + 1) * seq_len]
        assert (inside == number).sum() * 2 >= seq_len
    sizes = np.bincount(sets_of(batches.mixture, np.arange(10**5)), minlength=3)
    assert sizes[2] == 0, "what is in the validation split alone has no share"
    whole = batches.batch(11)
    for i in range(2):
        parts = [batches.batch(11, start, stop)[i] for start, stop in itertools.pairwise([0, 1, 5, 8])]
        assert np.array_equal(np.concatenate(parts), whole[i])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"A": 2, "Pile-C": 1}, "a weight to 'Pile-C', which is not a set of dataset_dir=.*: its sets are A, B, tiny$"),
        ({"val only": 1}, "a weight to 'val only', which is not a set"),
        ({"tiny": 2}, "'tiny' the weight 2, but no window consists mostly of it"),
        ({"A": 0, "B": 0}, "leaves nothing to train on"),
    ],
)
def test_a_mixture_that_cannot_be(dataset, weights, message):
    folder, manifest = dataset([("A", 100), ("B", 50), ("tiny", 1), ("A", 20)], val=[("val only", 5)])
    batches = TrainBatches(open_rows(TokenStream(folder, manifest, "train"), 10), batch_size=8, seed=0)
    with pytest.raises(UserError, match=message):
        batches.mix(weights)
    batches.mix({"tiny": 0})
    assert batches.mixture.quotas.tolist()[2] == 0
