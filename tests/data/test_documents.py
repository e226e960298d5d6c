import itertools

import numpy as np
import pytest

from common.settings import UserError
from data.documents import documents_in, sets_between
from data.prepare.dataset import prepare
from data.shards import HEADER, RECORD, TokenStream, read_manifest

DOCUMENTS = [[1, 2, 999], [3, 999], [4, 5, 6, 7, 8, 9, 999], [999], [10, 999], [11, 12, 999]]


def read_all(stream):
    """Every document of a split."""
    return list(documents_in(stream, 0, 10**9))


@pytest.mark.parametrize("shard_tokens", [1, 5, 8, 100])
def test_every_token_is_found_in_its_document(make_stream, tmp_path, shard_tokens):
    make_stream(*DOCUMENTS, shard_tokens=shard_tokens)
    stream, val = (TokenStream(tmp_path, read_manifest(tmp_path), split) for split in ("train", "val"))
    ends = [0, *itertools.accumulate(map(len, DOCUMENTS))]
    expected = [(*place, "set", "corpus.txt", i) for i, place in enumerate(itertools.pairwise(ends), start=1)]
    assert read_all(stream) == expected
    assert read_all(val) == []
    for start in range(ends[-1]):
        for stop in range(start + 1, ends[-1] + 1):
            found = list(documents_in(stream, start, stop))
            assert found == [place for place in expected if place[0] < stop and start < place[1]]


@pytest.mark.parametrize("shard_tokens", [1, 150, 10**6])
def test_the_set_of_every_token(corpus, config, tmp_path, shard_tokens):
    prepare(config(shard_tokens=shard_tokens))
    manifest = read_manifest(tmp_path / "out")
    stream = TokenStream(tmp_path / "out", manifest, "train")
    documents = read_all(stream)
    names = [document.set_name for document in documents for _ in range(document.start, document.stop)]
    assert len(set(names)) > 1, "of one set alone this would be no test"
    sets = [manifest.set_names.index(name) for name in names]
    for start, stop in [(0, len(sets)), (0, 1), (5, 5), (len(sets) - 1, len(sets)), *((i, i + 70) for i in range(100))]:
        found = sets_between(stream, start, stop)
        assert found.tolist() == sets[start:stop]


@pytest.mark.parametrize(
    ("row", "field", "value"),
    [
        (3, "set", 1),
        (3, "input", 2**32 - 1),
        (0, "number", 0),
        (3, "end", 2),
        (3, "end", 2**64 - 1),
        (-1, "end", 1),
    ],
)
def test_a_record_that_cannot_be_so_is_refused_at_once(make_stream, tmp_path, row, field, value):
    make_stream(*DOCUMENTS)
    stream = TokenStream(tmp_path, read_manifest(tmp_path), "train")
    path = tmp_path / "train-00000.idx"
    content = bytearray(path.read_bytes())
    records = np.frombuffer(content, RECORD, offset=HEADER.size)
    records[field][row] = value
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"train-00000\.idx is damaged: its records are not .*: prepare"):
        read_all(stream)
    records[field] = 0 if field == "end" else value
    path.write_bytes(content)
    for start in (0, 4, 15):
        with pytest.raises(UserError, match=r"train-00000\.idx is damaged: "):
            sets_between(stream, start, start + 1)
