import hashlib
import itertools
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from common.settings import UserError
from data import permutation
from data.loader import EvalBatches, TrainBatches, Windows, open_rows
from data.permutation import permute


class FakeStream:
    """Token i is i: no files, any length."""

    split, eot_id, has_markers = "train", -7, False

    def __init__(self, n_tokens):
        self.n_tokens = n_tokens

    def read(self, start, stop):
        assert 0 <= start <= stop <= self.n_tokens
        return np.arange(start, stop)


@pytest.mark.parametrize("n", [*range(1, 70), 255, 256, 257, 1000, 4097])
def test_permute_is_a_bijection(n):
    for key in ("0/0", "0/1", "1/0"):
        assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))


def test_a_batch_is_windows_of_the_stream(make_stream):
    tokens = np.random.default_rng(0).integers(0, 999, 120)
    stream = make_stream(tokens[:50], tokens[50:90], tokens[90:], shard_tokens=30)
    batches = TrainBatches(open_rows(stream, seq_len=7), batch_size=4, seed=3)
    assert len(batches.rows) == 17
    windows = {tuple(tokens[begin : begin + 8]) for begin in range(0, 119, 7)}
    for step in range(20):
        token_ids, targets = batches.batch(step)
        assert token_ids.shape == targets.shape == (4, 7)
        assert token_ids.dtype == targets.dtype == np.int64
        for row, target in zip(token_ids, targets, strict=True):
            assert (*row, target[-1]) in windows
            assert row[1:].tolist() == target[:-1].tolist()


@pytest.mark.parametrize(("n_tokens", "batch_size"), [(701, 10), (708, 16), (71, 32), (8, 5)])
def test_every_epoch_takes_each_window_once_also_where_batches_cross_its_end(n_tokens, batch_size):
    batches = TrainBatches(open_rows(FakeStream(n_tokens), seq_len=7), batch_size=batch_size, seed=0)
    n = len(batches.rows)
    assert n == (n_tokens - 1) // 7
    steps = -(-3 * n // batch_size)
    begins = np.concatenate([batches.batch(step)[0][:, 0] for step in range(steps)])
    epochs = [begins[i * n : (i + 1) * n] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(0, 7 * n, 7))
    if n > 10:
        assert not np.array_equal(epochs[0], epochs[1])


def test_a_batch_is_a_function_of_seed_and_step_alone():
    def batch(step, seed=0):
        return TrainBatches(open_rows(FakeStream(10_000), seq_len=10), batch_size=32, seed=seed).batch(step)[0].tolist()

    assert batch(5) == batch(5)
    assert batch(5) != batch(6)
    assert batch(5) != batch(5, seed=1)


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 32])
def test_ranks_share_the_global_batch(parts):
    rows = open_rows(FakeStream(1000), seq_len=10)
    batches = TrainBatches(rows, batch_size=32, seed=0)  # 99 windows: step 3 crosses an epoch
    whole = batches.batch(3)
    cuts = [32 * i // parts for i in range(parts + 1)]
    for i in range(2):
        split = [batches.batch(3, start, stop)[i] for start, stop in itertools.pairwise(cuts)]
        assert np.array_equal(np.concatenate(split), whole[i])
    assert batches.batch(3, 5, 5)[0].shape == (0, 10)


def inverse(values, n, key):
    """The inverse of `permute`: its rounds backwards, repeated until the result is inside the range."""
    half_bits = np.uint64((max(n - 1, 1).bit_length() + 1) // 2)
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    round_keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=64).digest(), "<u8")
    places, walking = values.astype(np.uint64), np.ones(values.shape, bool)
    while walking.any():
        left, right = places >> half_bits, places & mask
        for round_key in round_keys[::-1]:
            left, right = right ^ (permutation._mix(left + round_key) & mask), left
        places = np.where(walking, (left << half_bits) | right, places)
        walking = places >= n
    return places.astype(np.int64)


@pytest.mark.parametrize("n", [1, 2, 5, 64, 65, 1000, 976_562_499, 10**9 + 7, 2**40 + 1, 2**62])
def test_every_member_of_a_permutation_has_one_place(n):
    """An inverse shows at any size what the test above shows at small ones: the permutation is a bijection."""
    places = np.unique(np.random.default_rng(0).integers(0, n, 5000))
    assert np.array_equal(inverse(permute(places, n, "1/2"), n, "1/2"), places)
    assert np.array_equal(permute(inverse(places, n, "1/2"), n, "1/2"), places)


@pytest.mark.slow
def test_a_trillion_tokens_and_1024_ranks():
    n_tokens, seq_len, ranks, share = 10**12, 1024, 1024, 64
    batch_size = ranks * share
    batches = TrainBatches(open_rows(FakeStream(n_tokens), seq_len), batch_size, seed=0)
    n = len(batches.rows)
    last = n // batch_size
    assert 0 < n - last * batch_size < batch_size, "step `last` crosses into the second epoch"
    for step in (0, last - 1, last, last + 1, 10**9):
        of_ranks = [batches.numbers(step, rank * share, (rank + 1) * share) for rank in range(ranks)]
        windows = np.concatenate(of_ranks)
        assert np.array_equal(windows, batches.numbers(step))
        assert windows.min() >= 0
        assert windows.max() * seq_len + seq_len + 1 <= n_tokens
        epochs, places = np.divmod(step * batch_size + np.arange(batch_size), n)
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            assert np.unique(windows[now]).size == now.sum(), "no two ranks have the same window"
            assert np.array_equal(inverse(windows[now], n, f"0/{epoch}"), places[now]), "nor has any other step"
        first = 1023 * share
        token_ids, targets = batches.batch(step, first, first + 4)
        assert np.array_equal(token_ids[:, 0], windows[first : first + 4] * seq_len)
        assert np.array_equal(targets, token_ids + 1)


def test_numbers_do_not_overflow_at_the_end_of_a_long_run():
    batches = TrainBatches(open_rows(FakeStream(2**62), seq_len=1), batch_size=2**20, seed=2**63 - 1)
    assert len(batches.rows) == 2**62 - 1
    token_ids, _ = batches.batch(2**42 - 1, 2**20 - 50, 2**20)  # the last step that crosses into the second epoch
    assert token_ids.min() >= 0
    assert token_ids.max() < len(batches.rows)
    assert np.unique(token_ids).size >= 49
    last = batches.numbers(0, 2**62 - 2, 2**62)
    assert 0 <= batches.numbers(2**43 - 1, 2**20 - 1)[0] < 2**62 - 1, "sequence 2^63 - 1"
    assert inverse(last[:1], 2**62 - 1, f"{2**63 - 1}/0").tolist() == [2**62 - 2]
    assert inverse(last[1:2], 2**62 - 1, f"{2**63 - 1}/1").tolist() == [0]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not tell which files are mapped")
@pytest.mark.slow
def test_memory_does_not_grow_however_much_is_read(make_stream):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 999, 2**20).astype(np.uint16) for _ in range(8)]
    batches = TrainBatches(open_rows(make_stream(*documents, shard_tokens=2**22), seq_len=1023), batch_size=64, seed=0)
    tracemalloc.start()
    for step in range(60):  # half of 16 MB
        batches.batch(step)
    assert tracemalloc.get_traced_memory()[0] < 2**20, "less than a batch"
    tracemalloc.stop()
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if ".bin" in line]
    assert not [
        file for file in Path("/proc/self/fd").iterdir() if file.is_symlink() and ".bin" in str(file.readlink())
    ]


def test_a_split_shorter_than_a_window():
    assert TrainBatches(open_rows(FakeStream(8), seq_len=7), batch_size=1, seed=0).rows.seq_len == 7
    with pytest.raises(UserError, match="seq_len=7 needs 8 tokens, split 'train' has 7"):
        TrainBatches(open_rows(FakeStream(7), seq_len=7), batch_size=1, seed=0)


@pytest.mark.parametrize("stride", [None, 1, 2, 3, 6, 7])
@pytest.mark.parametrize("n_tokens", [2, 7, 8, 9, 71, 72, 100])
def test_evaluation_covers_every_target_once_and_with_a_stride_far_in(n_tokens, stride):
    windows = Windows(FakeStream(n_tokens), seq_len=7, stride=stride)
    batches = EvalBatches(windows)
    token_ids, targets = batches.rows(0, len(batches))
    counted = targets >= 0
    assert targets[counted].tolist() == list(range(1, n_tokens))
    assert np.array_equal(token_ids[counted] + 1, targets[counted])
    assert counted.any(axis=1).all(), "no row is only padding"
    assert (targets[~counted] == -1).all()
    assert stride or (token_ids[~counted] == -7).all(), "the end of the text is filled up"
    assert [windows.bounds(i)[0] for i in range(len(batches))] == token_ids[:, 0].tolist()
    step = stride or 7
    assert np.diff(token_ids[:, 0]).tolist() == [step] * (len(batches) - 1)
    assert (np.argmax(counted, axis=1)[1:] == 7 - step).all(), "so many tokens stand before the first that counts"


@pytest.mark.parametrize("n_windows", [1, 2, 3, 10, 14, 15, 100])
def test_evaluation_of_some_windows_spreads_them(n_windows):
    batches = EvalBatches(Windows(FakeStream(100), seq_len=7), n_windows)  # has 15 windows
    assert len(batches) == min(n_windows, 15)
    token_ids, _ = batches.rows(0, len(batches))
    begins = token_ids[:, 0]
    assert begins[0] == 0
    gaps = np.diff(np.append(begins, 105)) // 7
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1
    parts = [batches.rows(i, i + 1)[0] for i in range(len(batches))]
    assert np.array_equal(np.concatenate(parts), token_ids)
