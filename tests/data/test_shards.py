import hashlib

import numpy as np
import pytest
from forged import edit

from common.settings import UserError
from data.shards import read_manifest, token_dtype


@pytest.mark.parametrize(("n_vocab", "itemsize"), [(257, 2), (65_536, 2), (65_537, 4)])
def test_ids_take_as_few_bytes_as_hold_them(make_stream, tmp_path, n_vocab, itemsize):
    ids = [0, 1, n_vocab - 1]
    stream = make_stream(ids, n_vocab=n_vocab)
    assert (tmp_path / "train-00000.bin").read_bytes() == b"".join(i.to_bytes(itemsize, "little") for i in ids)
    assert stream.read(0, 3).tolist() == ids
    assert token_dtype(n_vocab).itemsize == itemsize


def test_shards_hold_whole_documents_and_read_as_one_row(make_stream, tmp_path):
    documents = [[1, 2, 999], [3, 999], [4, 5, 6, 7, 8, 9, 999], [10, 999]]
    stream = make_stream(*documents, shard_tokens=5)
    manifest = read_manifest(tmp_path)
    assert [(shard.tokens, shard.documents) for shard in manifest.splits["train"].shards] == [(5, 2), (7, 1), (2, 1)]
    for shard in manifest.splits["train"].shards:
        assert shard.sha256 == hashlib.sha256((tmp_path / shard.file).read_bytes()).hexdigest()
    row = [i for document in documents for i in document]
    assert stream.n_tokens == len(row)
    for start in range(len(row) + 1):
        for stop in range(start, len(row) + 1):
            read = stream.read(start, stop)
            assert read.dtype == np.int64
            assert read.tolist() == row[start:stop]


def test_missing_dataset(tmp_path):
    with pytest.raises(UserError, match=r"none does not exist .* give the folder of a dataset, or make one"):
        read_manifest(tmp_path / "none")


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_bytes(b"x" * 5)])
@pytest.mark.parametrize(("file", "size"), [("train-00000.bin", 6), ("train-00000.idx", 54)])
def test_a_file_of_the_wrong_size_is_named(make_stream, tmp_path, change, file, size):
    make_stream([1, 2, 999])
    change(tmp_path / file)
    with pytest.raises(UserError, match=f"{file} (is missing|has 5 bytes), the manifest says {size} bytes"):
        read_manifest(tmp_path)


def test_a_shard_cut_while_it_is_used(make_stream, tmp_path):
    stream = make_stream([1, 2, 999])
    (tmp_path / "train-00000.bin").write_bytes(b"\1\0")
    with pytest.raises(UserError, match=r"train-00000\.bin is damaged: it is shorter"):
        stream.read(0, 3)


def test_fingerprint_is_of_tokenizer_tokens_and_sets(make_stream, tmp_path):
    def fingerprint(*documents, change=None):
        make_stream(*documents)
        if change:
            edit(tmp_path / "manifest.json", change)
        return read_manifest(tmp_path).fingerprint

    def other_set(raw):
        raw.update(set_names=["other"])
        raw["splits"]["train"]["sets"] = {"other": raw["splits"]["train"]["sets"]["set"]}

    same = fingerprint([1, 2, 999])
    assert same == fingerprint([1, 2, 999])
    assert same == fingerprint([1, 2, 999], change=lambda raw: raw.update(inputs=["moved.txt"]))
    others = [
        fingerprint([1, 3, 999]),
        fingerprint([1, 2, 999], change=lambda raw: raw["tokenizer"].update(sha256="1" * 64)),
        fingerprint([1, 2, 999], change=other_set),
        fingerprint([1, 2, 999], change=lambda raw: raw["splits"]["train"]["shards"][0].update(index_sha256="1" * 64)),
    ]
    assert len({same, *others}) == 5
