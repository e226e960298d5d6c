import random

import numpy as np
import pytest

from common.settings import UserError, decode
from data.prepare.writer import Names, ShardWriter, WriterState
from data.shards import HEADER, RECORD

N_VOCAB = 1000


def documents(n=60, seed=0):
    """Arguments of append."""
    rng = random.Random(seed)
    return [
        (np.array([*rng.choices(range(999), k=rng.randrange(0, 40)), 999]), f"set {i % 3}", i, f"file {i // 20}", i + 1)
        for i in range(n)
    ]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def writer(tmp_path):
    """Opens writers of one split, with the tables of one dataset."""
    opened = []

    def make(name="out", state=None, set_names=(), inputs=()):
        (tmp_path / name).mkdir(exist_ok=True)
        tables = Names("sets", 100, set_names), Names("inputs", 100, inputs)
        opened.append(ShardWriter(tmp_path / name, "train", N_VOCAB, 200, *tables, state))
        return opened[-1]

    yield make
    for each in opened:
        each.__exit__()


def write_all(writer, given):
    for document in given:
        writer.append(*document)
    return writer.finish()


def test_the_index_says_where_each_document_ends_and_where_it_is_from(writer, tmp_path):
    given = documents()
    split = write_all(writer(), given)
    assert len(split.shards) > 3
    records = [
        np.frombuffer((tmp_path / "out" / shard.index_file).read_bytes()[HEADER.size :], RECORD)
        for shard in split.shards
    ]
    assert [len(part) for part in records] == [shard.documents for shard in split.shards]
    for shard, part in zip(split.shards, records, strict=True):
        assert part["end"][-1] == shard.tokens
        ids = np.fromfile(tmp_path / "out" / shard.file, "<u2")
        assert (np.flatnonzero(ids == 999) + 1).tolist() == part["end"].tolist()
    everything = np.concatenate(records)
    assert everything["number"].tolist() == [document[4] for document in given]
    assert everything["input"].tolist() == [i // 20 for i in range(len(given))]
    assert everything["set"].tolist() == [i % 3 for i in range(len(given))]


@pytest.mark.parametrize("written", [0, 1, 7, 30, 59, 60])
def test_a_writer_goes_on_from_its_state_to_the_same_bytes(writer, tmp_path, written):
    given = documents()
    whole = write_all(writer(), given)
    first = writer("stopped")
    for document in given[:written]:
        first.append(*document)
    first.flush()
    raw = first.state().model_dump(mode="json")
    names = {"set_names": first.set_names.names.copy(), "inputs": first.inputs.names.copy()}
    for document in documents(25, seed=1):  # written after the state was kept, and lost
        first.append(*document)
    first.__exit__()
    again = writer("stopped", decode(WriterState, raw), **names)
    assert again.state().model_dump(mode="json") == raw
    assert write_all(again, given[written:]) == whole
    assert contents(tmp_path / "stopped").items() >= contents(tmp_path / "out").items()


def test_what_is_flushed_is_in_the_files(writer, tmp_path):
    one = writer()
    one.append(*documents()[0])
    one.flush()
    state = one.state()
    assert (tmp_path / "out" / "train-00000.bin").stat().st_size == 2 * state.open.tokens
    assert (tmp_path / "out" / "train-00000.idx").stat().st_size == HEADER.size + RECORD.itemsize


@pytest.mark.parametrize("file", ["train-00000.bin", "train-00000.idx", "train-00001.bin", "train-00001.idx"])
@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_bytes(b"x")])
def test_a_state_whose_files_are_gone_is_refused(writer, tmp_path, file, change):
    one = writer()
    while len(one.state().shards) < 1 or one.state().open is None:
        one.append(*documents(1, seed=3)[0])
    one.flush()
    change(tmp_path / "out" / file)
    with pytest.raises(UserError, match=file):
        writer(state=one.state())


def test_names_have_numbers_in_the_order_of_their_first_use():
    names = Names("sets", 2)
    assert [names.number(name) for name in "ABBA"] == [0, 1, 1, 0]
    assert names.names == ["A", "B"]
    with pytest.raises(UserError, match="'C' is one more than the 2 sets a dataset can hold"):
        names.number("C")
