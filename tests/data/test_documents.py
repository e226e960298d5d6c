import itertools
import json
import tracemalloc

import numpy as np
import pytest

from common.settings import UserError
from data.documents import document_at, read_documents, read_records, sets_between
from data.prepare.dataset import prepare
from data.shards import HEADER, RECORD, TokenStream, read_manifest

DOCUMENTS = [[1, 2, 999], [3, 999], [4, 5, 6, 7, 8, 9, 999], [999], [10, 999], [11, 12, 999]]


@pytest.mark.parametrize("shard_tokens", [1, 5, 8, 100])
def test_documents_come_back_as_they_were_written(make_stream, tmp_path, shard_tokens):
    make_stream(*DOCUMENTS, shard_tokens=shard_tokens)
    found = list(read_documents(tmp_path, read_manifest(tmp_path), "train"))
    assert [document.ids.tolist() for document in found] == DOCUMENTS
    assert [document[1:] for document in found] == [("set", "corpus.txt", i) for i in range(1, len(DOCUMENTS) + 1)]
    assert list(read_documents(tmp_path, read_manifest(tmp_path), "val")) == []


@pytest.mark.parametrize("shard_tokens", [1, 5, 8, 100])
def test_every_token_is_found_in_its_document(make_stream, tmp_path, shard_tokens):
    make_stream(*DOCUMENTS, shard_tokens=shard_tokens)
    manifest = read_manifest(tmp_path)
    ends = list(itertools.accumulate(map(len, DOCUMENTS)))
    for number, (start, stop) in enumerate(itertools.pairwise([0, *ends]), start=1):
        for token in range(start, stop):
            assert document_at(tmp_path, manifest, "train", token) == (start, stop, "set", "corpus.txt", number)
    for token in (-1, ends[-1]):
        with pytest.raises(IndexError):
            document_at(tmp_path, manifest, "train", token)


@pytest.mark.parametrize("shard_tokens", [1, 150, 10**6])
def test_the_set_of_every_token(corpus, config, tmp_path, shard_tokens):
    prepare(config(shard_tokens=shard_tokens))
    manifest = read_manifest(tmp_path / "out")
    documents = read_documents(tmp_path / "out", manifest, "train")
    names = [document.set_name for document in documents for _ in document.ids]
    assert len(set(names)) > 1, "of one set alone this would be no test"
    sets = [manifest.set_names.index(name) for name in names]
    for start, stop in [(0, len(sets)), (0, 1), (5, 5), (len(sets) - 1, len(sets)), *((i, i + 70) for i in range(100))]:
        found = sets_between(tmp_path / "out", manifest, "train", start, stop)
        assert found.tolist() == sets[start:stop]


@pytest.mark.parametrize("file", ["train-00001.bin", "train-00001.idx"])
@pytest.mark.parametrize("place", [32, -1])
def test_damage_is_found_while_reading(make_stream, tmp_path, file, place):
    make_stream(*[[i, *range(20), 999] for i in range(40)], shard_tokens=400)
    manifest = read_manifest(tmp_path)
    content = bytearray((tmp_path / file).read_bytes())
    content[place] ^= 1
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=rf"{file} is damaged"):
        list(read_documents(tmp_path, manifest, "train"))


@pytest.mark.parametrize(("field", "value"), [("end", 0), ("end", 2**63), ("set", 7), ("input", 7), ("number", 0)])
def test_a_record_that_cannot_be_so_is_refused_at_once(make_stream, tmp_path, field, value):
    make_stream(*DOCUMENTS)
    manifest = read_manifest(tmp_path)
    path = tmp_path / "train-00000.idx"
    content = bytearray(path.read_bytes())
    np.frombuffer(content, RECORD, offset=HEADER.size)[field][:] = value
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"train-00000\.idx is damaged: a document is said to"):
        next(read_documents(tmp_path, manifest, "train"))
    with pytest.raises(UserError, match=r"train-00000\.idx is damaged: "):
        sets_between(tmp_path, manifest, "train", 0, 4)
    with pytest.raises(UserError, match=r"train-00000\.idx is damaged: "):
        document_at(tmp_path, manifest, "train", 4)


@pytest.mark.parametrize("size", [0, 40, 54])
def test_an_index_cut_while_it_is_used(make_stream, tmp_path, size):
    make_stream(*DOCUMENTS)
    manifest = read_manifest(tmp_path)
    path = tmp_path / "train-00000.idx"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=r"train-00000\.idx is shorter"):
        document_at(tmp_path, manifest, "train", 15)
    with pytest.raises(UserError, match=r"train-00000\.idx is shorter than its manifest says"):
        list(read_documents(tmp_path, manifest, "train"))


def test_tokens_cut_while_they_are_read(make_stream, tmp_path):
    make_stream(*DOCUMENTS)
    manifest = read_manifest(tmp_path)
    path = tmp_path / "train-00000.bin"
    path.write_bytes(path.read_bytes()[:7])
    with pytest.raises(UserError, match=r"train-00000\.bin is shorter than its manifest says"):
        list(read_documents(tmp_path, manifest, "train"))


def test_a_long_split_takes_little_memory(make_stream, tmp_path):
    stream = make_stream(*[[1, 999]] * 200_000)
    manifest = read_manifest(tmp_path)
    tracemalloc.start()
    for token in range(0, stream.n_tokens, 10_000):
        assert document_at(tmp_path, manifest, "train", token).number == token // 2 + 1
    assert tracemalloc.get_traced_memory()[1] < 200_000, "an index of 4.4 MB"
    assert sum(records.size for records in read_records(tmp_path, manifest, manifest.splits["train"].shards[0])) == 2e5
    assert tracemalloc.get_traced_memory()[1] < 3_000_000
    tracemalloc.stop()


def test_documents_are_those_of_the_input(config, corpus):
    prepare(config(shard_tokens=700))
    out_dir = config().out_dir
    manifest = read_manifest(out_dir)
    lines = corpus.read_text().splitlines()
    numbers = []
    for split in ("train", "val"):
        stream, start = TokenStream(out_dir, manifest, split), 0
        for document in read_documents(out_dir, manifest, split):
            text = bytes(document.ids[:-1].astype(np.uint8)).decode()
            assert f'"text": {json.dumps(text)}' in lines[document.number - 1]
            assert document.input == str(corpus)
            place = document_at(out_dir, manifest, split, start)
            assert place == (start, start + document.ids.size, *document[1:])
            assert stream.read(start, place.stop).tolist() == document.ids.tolist()
            start = place.stop
            numbers.append(document.number)
    assert sorted(numbers) == list(range(1, 201)), "every document of the input is in one split"
