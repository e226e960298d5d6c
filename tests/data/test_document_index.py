import itertools

import pytest

from common.settings import UserError
from data.document_index import find_documents, read_sets
from data.shards import TokenStream

DOCUMENTS = [[1, 2, 999], [3, 999], [4, 5, 6, 7, 8, 9, 999], [999], [10, 999], [11, 12, 999]]


def read_all(stream):
    """Every document of a split."""
    return list(find_documents(stream, 0, 10**9))


@pytest.mark.parametrize("shard_tokens", [1, 5, 8, 100])
def test_every_token_is_found_in_its_document_and_set(make_stream, shard_tokens):
    sets = [0, 1, 0, 0, 2, 1]
    stream = make_stream(*DOCUMENTS, sets=sets, set_names="ABC", shard_tokens=shard_tokens)
    expected = []
    sets_of_tokens = []
    for number, (ids, owner) in enumerate(zip(DOCUMENTS, sets, strict=True), start=1):
        start = len(sets_of_tokens)
        sets_of_tokens += [owner] * len(ids)
        expected.append((start, len(sets_of_tokens), "ABC"[owner], "corpus.txt", number))
    assert read_all(stream) == expected
    for start, stop in itertools.combinations(range(stream.n_tokens + 1), 2):
        found = list(find_documents(stream, start, stop))
        assert found == [place for place in expected if place[0] < stop and start < place[1]]
        assert read_sets(stream, start, stop).tolist() == sets_of_tokens[start:stop]
    assert read_all(TokenStream(stream.dataset_dir, stream.manifest, "val")) == []


def test_a_damaged_index_is_refused_at_once(make_stream, tmp_path):
    stream = make_stream(*DOCUMENTS)
    path = tmp_path / "train-00000.idx"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"train-00000\.idx is damaged: its sha256 is"):
        read_all(stream)


def test_an_index_of_other_inputs_is_refused(make_stream):
    stream = make_stream(*DOCUMENTS)
    stream.manifest.inputs.clear()
    with pytest.raises(UserError, match=r"train-00000\.idx is damaged: its records are not .*: prepare"):
        read_all(stream)
