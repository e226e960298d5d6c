import itertools

import numpy as np
import pytest
from forged import edit

from common.settings import UserError
from data.shards import read_manifest


@pytest.mark.parametrize(("n_vocab", "itemsize"), [(257, 2), (65_536, 2), (65_537, 4)])
def test_ids_take_as_few_bytes_as_hold_them(make_stream, tmp_path, n_vocab, itemsize):
    ids = [0, 1, n_vocab - 1]
    stream = make_stream(ids, n_vocab=n_vocab)
    assert (tmp_path / "train-00000.bin").read_bytes() == b"".join(i.to_bytes(itemsize, "little") for i in ids)
    assert stream.read(0, 3).tolist() == ids


def test_shards_read_as_one_row(make_stream):
    documents = [[1, 2, 999], [3, 999], [4, 5, 6, 7, 8, 9, 999], [10, 999]]
    stream = make_stream(*documents, shard_tokens=5)
    assert len(stream.manifest.splits["train"].shards) == 3
    row = [*itertools.chain(*documents)]
    assert stream.n_tokens == len(row)
    for start, stop in itertools.combinations_with_replacement(range(len(row) + 1), 2):
        read = stream.read(start, stop)
        assert read.dtype == np.int64
        assert read.tolist() == row[start:stop]


def test_missing_dataset(tmp_path):
    with pytest.raises(UserError, match=r"none does not exist .* give the folder of a dataset, or make one"):
        read_manifest(tmp_path / "none")


def test_a_shard_cut_while_it_is_used(make_stream, tmp_path):
    stream = make_stream([1, 2, 999])
    (tmp_path / "train-00000.bin").write_bytes(b"\1\0")
    with pytest.raises(UserError, match=r"train-00000\.bin is damaged: it is shorter"):
        stream.read(0, 3)


def test_fingerprint_is_of_tokenizer_tokens_and_sets(make_stream, tmp_path):
    def fingerprint(change=lambda raw: None, documents=([1, 2, 999],)):
        make_stream(*documents)
        edit(tmp_path / "manifest.json", change)
        return read_manifest(tmp_path).fingerprint

    def other_index(raw):
        raw["splits"]["train"]["shards"][0]["index_sha256"] = "1" * 64

    same = fingerprint()
    assert fingerprint(lambda raw: raw.update(inputs=["moved.txt"])) == same
    others = [
        fingerprint(documents=[[1, 3, 999]]),
        fingerprint(lambda raw: raw["tokenizer"].update(sha256="1" * 64)),
        fingerprint(lambda raw: raw.update(set_names=["other"])),
        fingerprint(other_index),
    ]
    assert len({same, *others}) == 5


def test_a_file_of_the_wrong_size_is_named(make_stream, tmp_path):
    make_stream([1, 2, 999])
    path = tmp_path / "train-00000.idx"
    path.write_bytes(b"x" * 5)
    with pytest.raises(UserError, match="idx has 5 bytes, the manifest says 54 bytes: prepare"):
        read_manifest(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="idx is missing, the manifest says 54 bytes"):
        read_manifest(tmp_path)
