import hashlib
import itertools
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from common.settings import UserError
from data import permutation
from data.loader import EvalBatches, TrainBatches, Windows, open_rows
from data.permutation import permute_places


class FakeStream:
    """Token i is i: no files, any length."""

    split = "train"
    eot_id = -7

    def __init__(self, n_tokens):
        self.n_tokens = n_tokens

    def read(self, start, stop):
        assert 0 <= start <= stop <= self.n_tokens
        return np.arange(start, stop)


def open_batches(n_tokens, batch_size, seq_len=7, seed=0):
    return TrainBatches(open_rows(FakeStream(n_tokens), seq_len), batch_size, seed)


def test_a_batch_is_windows_of_the_stream(make_stream):
    tokens = np.random.default_rng(0).integers(0, 999, 120)
    stream = make_stream(tokens[:50], tokens[50:90], tokens[90:], shard_tokens=30)
    batches = TrainBatches(open_rows(stream, seq_len=7), batch_size=4, seed=3)
    windows = [tokens[begin : begin + 8].tolist() for begin in range(0, 119, 7)]
    assert len(batches.rows) == len(windows) == 17
    for step in range(20):
        token_ids, targets = batches.batch(step)
        assert token_ids.dtype == targets.dtype == np.int64
        for row, number in enumerate(batches.numbers(step)):
            assert token_ids[row].tolist() == windows[number][:-1]
            assert targets[row].tolist() == windows[number][1:]


@pytest.mark.parametrize(("n_tokens", "batch_size"), [(701, 10), (708, 16), (71, 32), (8, 5)])
def test_every_epoch_takes_each_window_once_also_where_batches_cross_its_end(n_tokens, batch_size):
    batches = open_batches(n_tokens, batch_size)
    n = len(batches.rows)
    assert n == (n_tokens - 1) // 7
    n_steps = -(-3 * n // batch_size)
    begins = np.concatenate([batches.batch(step)[0][:, 0] for step in range(n_steps)])
    epochs = begins[: 3 * n].reshape(3, n)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(0, 7 * n, 7))
    if n > 10:
        assert epochs[0].tolist() != epochs[1].tolist()


def test_a_batch_is_a_function_of_seed_and_step_alone():
    first = open_batches(10_000, 32).numbers(5).tolist()
    assert open_batches(10_000, 32).numbers(5).tolist() == first
    assert open_batches(10_000, 32).numbers(6).tolist() != first
    assert open_batches(10_000, 32, seed=1).numbers(5).tolist() != first


@pytest.mark.parametrize("parts", [1, 3, 32])
def test_ranks_share_the_global_batch(parts):
    batches = open_batches(1000, 32, seq_len=10)  # 99 windows: step 3 crosses an epoch
    cuts = [32 * i // parts for i in range(parts + 1)]
    shares = [batches.batch(3, start, stop) for start, stop in itertools.pairwise(cuts)]
    assert np.array_equal(np.concatenate(shares, axis=1), batches.batch(3))
    assert batches.batch(3, 5, 5)[0].shape == (0, 10)


def invert(values, n, key):
    """Undo `permute`: its rounds backwards, repeated until the result is inside the range."""
    half_bits = np.uint64((max(n - 1, 1).bit_length() + 1) // 2)
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    digest = hashlib.blake2b(key.encode(), digest_size=64).digest()
    places = values.astype(np.uint64)
    walking = np.ones(values.shape, bool)
    while walking.any():
        left = places >> half_bits
        right = places & mask
        for round_key in np.frombuffer(digest, "<u8")[::-1]:
            mixed = permutation._mix(left + round_key) & mask
            previous = left
            left = right ^ mixed
            right = previous
        places = np.where(walking, (left << half_bits) | right, places)
        walking = places >= n
    return places.astype(np.int64)


@pytest.mark.parametrize("n", [*range(1, 70), 1000, 10**9 + 7, 2**40 + 1, 2**62])
def test_every_member_of_a_permutation_has_one_place(n):
    """An inverse shows that it is a bijection, at any size."""
    places = np.unique(np.random.default_rng(0).integers(0, n, 5000))
    assert np.array_equal(invert(permute_places(places, n, "1/2"), n, "1/2"), places)
    assert np.array_equal(permute_places(invert(places, n, "1/2"), n, "1/2"), places)


def test_numbers_do_not_overflow_at_the_end_of_a_long_run():
    batches = open_batches(2**62, 2**20, seq_len=1, seed=2**63 - 1)
    n = 2**62 - 1
    assert len(batches.rows) == n
    assert 0 <= batches.numbers(2**43 - 1, 2**20 - 1)[0] < n, "sequence 2^63 - 1"
    last = batches.numbers(0, 2**62 - 2, 2**62)
    assert invert(last[:1], n, f"{2**63 - 1}/0").tolist() == [2**62 - 2]
    assert invert(last[1:2], n, f"{2**63 - 1}/1").tolist() == [0]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system has no such file")
@pytest.mark.slow
def test_memory_does_not_grow_however_much_is_read(make_stream):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 999, 2**20).astype(np.uint16) for _ in range(8)]
    rows = open_rows(make_stream(*documents, shard_tokens=2**22), seq_len=1023)
    batches = TrainBatches(rows, batch_size=64, seed=0)
    tracemalloc.start()
    for step in range(60):  # half of 16 MB
        batches.batch(step)
    assert tracemalloc.get_traced_memory()[0] < 2**20, "less than a batch"
    tracemalloc.stop()
    assert ".bin" not in Path("/proc/self/maps").read_text()


def test_a_split_shorter_than_a_window():
    assert len(open_batches(8, 1).rows) == 1
    with pytest.raises(UserError, match="seq_len=7 needs 8 tokens, split 'train' has 7"):
        open_batches(7, 1)


@pytest.mark.parametrize("stride", [None, 1, 2, 3, 6, 7])
@pytest.mark.parametrize("n_tokens", [2, 7, 8, 9, 71, 72, 100])
def test_evaluation_covers_every_target_once_and_with_a_stride_far_in(n_tokens, stride):
    windows = Windows(FakeStream(n_tokens), seq_len=7, stride=stride)
    token_ids, targets = EvalBatches(windows).rows(0, len(windows))
    counted = targets >= 0
    assert targets[counted].tolist() == list(range(1, n_tokens))
    assert np.array_equal(token_ids[counted] + 1, targets[counted])
    assert counted.any(axis=1).all(), "no row is only padding"
    assert (targets[~counted] == -1).all()
    assert stride or (token_ids[~counted] == -7).all(), "the end of the text is filled up"
    step = stride or 7
    assert token_ids[:, 0].tolist() == [step * i for i in range(len(windows))]
    assert (np.argmax(counted, axis=1)[1:] == 7 - step).all(), "what stands before the first"


@pytest.mark.parametrize("n_windows", [1, 2, 3, 10, 14, 15, 100])
def test_evaluation_of_some_windows_spreads_them(n_windows):
    batches = EvalBatches(Windows(FakeStream(100), seq_len=7), n_windows)  # has 15 windows
    assert len(batches) == min(n_windows, 15)
    token_ids, _ = batches.rows(0, len(batches))
    assert token_ids[0, 0] == 0
    gaps = np.diff(np.append(token_ids[:, 0], 105)) // 7
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1
