import itertools
import random

import numpy as np
import pytest
from test_prepare import contents

from data.prepare.writer import ShardWriter
from data.shards import HEADER, RECORD

N_VOCAB = 1000
SHARD_TOKENS = 200


def documents(n=60, seed=0):
    """Ids, lengths and records of some documents of three files and three sets."""
    rng = random.Random(seed)
    ids = [np.array([*rng.choices(range(999), k=rng.randrange(0, 40)), 999]) for _ in range(n)]
    records = np.zeros(n, RECORD)
    records["input"], records["number"], records["set"] = np.arange(n) // 20, 1 + np.arange(n), np.arange(n) % 3
    return ids, records


def write(folder, ids, records, cuts):
    """The shards, where the documents come in several calls."""
    folder.mkdir()
    writer = ShardWriter(folder, "train", N_VOCAB, SHARD_TOKENS)
    for first, last in itertools.pairwise([0, *cuts, len(ids)]):
        if first < last:
            lengths = np.array([one.size for one in ids[first:last]])
            writer.append(np.concatenate(ids[first:last]), lengths, records[first:last])
    return writer.finish()


def test_the_index_says_where_each_document_ends_and_where_it_is_from(tmp_path):
    ids, given = documents()
    shards = write(tmp_path / "out", ids, given, [])
    assert len(shards) > 3
    records = [
        np.frombuffer((tmp_path / "out" / shard.index_file).read_bytes()[HEADER.size :], RECORD) for shard in shards
    ]
    assert [len(part) for part in records] == [shard.documents for shard in shards]
    for shard, part in zip(shards, records, strict=True):
        assert part["end"][-1] == shard.tokens
        written = np.fromfile(tmp_path / "out" / shard.file, "<u2")
        assert (np.flatnonzero(written == 999) + 1).tolist() == part["end"].tolist()
    for shard in shards[:-1]:
        part = records[shards.index(shard)]
        assert part["end"][-1] >= SHARD_TOKENS, "full with the document that reaches its size"
        assert len(part) == 1 or part["end"][-2] < SHARD_TOKENS
    everything = np.concatenate(records)
    for field in ("number", "input", "set"):
        assert everything[field].tolist() == given[field].tolist()
    assert np.concatenate([np.fromfile(tmp_path / "out" / s.file, "<u2") for s in shards]).tolist() == (
        np.concatenate(ids).tolist()
    )


@pytest.mark.parametrize("cuts", [range(1, 60), [1], [7, 30], [59], range(0, 60, 13)])
def test_the_bytes_do_not_depend_on_how_documents_come(tmp_path, cuts):
    ids, records = documents()
    assert write(tmp_path / "whole", ids, records, []) == write(tmp_path / "pieces", ids, records, cuts)
    assert contents(tmp_path / "whole") == contents(tmp_path / "pieces")


def test_a_full_shard_at_the_very_end_leaves_no_empty_one(tmp_path):
    ids, records = [np.full(SHARD_TOKENS, 999)] * 2, documents()[1][:2]
    assert [shard.tokens for shard in write(tmp_path / "out", ids, records, [1])] == [SHARD_TOKENS] * 2
    assert len(contents(tmp_path / "out")) == 4
