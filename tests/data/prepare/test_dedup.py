"""Exact deduplication: the first of equal texts stays, across kills, in bounded memory."""

import hashlib
import json
import os
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.settings import UserError
from data.prepare.dataset import prepare
from data.prepare.dedup import DIGESTS, SeenDigests, read_digests
from data.prepare.encode import document_digest
from data.shards import TokenStream, read_manifest


def documents(folder, split):
    """The texts of a split of a dataset of bytes, as bytes."""
    stream = TokenStream(folder, read_manifest(folder), split)
    ids = stream.read(0, stream.n_tokens)
    ends = np.flatnonzero(ids == stream.eot_id)
    starts = [0, *(ends[:-1] + 1)]
    return [bytes(ids[start:end].tolist()) for start, end in zip(starts, ends, strict=True)]


def digest(text):
    return document_digest(text.encode())


def test_the_first_of_equal_texts_stays(config, corpus, tmp_path):
    rng = random.Random(0)
    lines = rng.choices(corpus.read_text().splitlines(), k=500)
    corpus.write_text("\n".join(lines))
    manifest = prepare(config(dedup="exact"))
    texts = [json.loads(line)["text"].encode() for line in lines]
    kept = list(dict.fromkeys(texts))
    assert manifest.skipped == {"duplicate document": len(texts) - len(kept)}
    for split in ("train", "val"):
        written = documents(tmp_path / "out", split)
        assert written == [text for text in kept if text in set(written)], "in order, each once"
    assert sum(split.total.documents for split in manifest.splits.values()) == len(kept)
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.suffix not in (".bin", ".idx")) == [
        "manifest.json",
        "tokenizer.json",
    ]


def test_where_a_duplicate_was_met_first_is_said(config, corpus, capsys):
    corpus.write_text(corpus.read_text() + corpus.read_text().splitlines()[7])
    prepare(config(dedup="exact"))
    out = capsys.readouterr().out
    assert f"skipped 1 x duplicate document (first: {corpus}:201)" in out
    assert "201 documents in the input: 200 written, 1 skipped" in out


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), min_size=60, max_size=120),
    dedup=st.sampled_from(["none", "exact"]),
    val_fraction=st.floats(0.3, 0.7),
)
def test_no_document_is_in_two_splits_and_all_are_accounted_for(
    config, corpus, tmp_path_factory, texts, dedup, val_fraction
):
    texts += [f"{i}" for i in range(40)]  # something for each split
    corpus.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    out = tmp_path_factory.mktemp("any") / "out"
    manifest = prepare(config(dedup=dedup, val_fraction=val_fraction, out_dir=str(out)))
    train, val = documents(out, "train"), documents(out, "val")
    assert not set(train) & set(val)
    assert len(train) + len(val) + sum(manifest.skipped.values()) == len(texts)
    assert set(train) | set(val) == {text.encode() for text in texts if text}
    if dedup == "exact":
        assert len(set(train)) == len(train)
        assert len(set(val)) == len(val)


def test_entries_of_a_lost_stretch_are_the_documents_themselves(tmp_path):
    with SeenDigests(tmp_path, 0) as seen:
        assert [seen.is_duplicate(digest(text), i) for i, text in enumerate("abac", start=1)] == [0, 0, 1, 0]
        seen.commit()
    with SeenDigests(tmp_path, 2) as seen:  # the journal knew of "ab" alone
        assert [seen.is_duplicate(digest(text), i) for i, text in enumerate("acdb", start=3)] == [1, 0, 0, 1]


def test_what_was_not_committed_is_forgotten(tmp_path):
    with SeenDigests(tmp_path, 0) as seen:
        seen.is_duplicate(digest("a"), 1)
        seen.commit()
        seen.is_duplicate(digest("b"), 2)
    with SeenDigests(tmp_path, 1) as seen:
        assert not seen.is_duplicate(digest("b"), 2)
        assert seen.is_duplicate(digest("a"), 3)


def test_another_document_in_the_place_of_one_is_noticed(tmp_path):
    with SeenDigests(tmp_path, 0) as seen:
        seen.is_duplicate(digest("a"), 1)
        seen.is_duplicate(digest("b"), 2)
        for text, number in (("c", 2), ("b", 1)):
            with pytest.raises(UserError, match=rf"document {number} is not what it was before the restart: delete"):
                seen.is_duplicate(digest(text), number)


def test_saved_digests_are_read_again_and_checked(tmp_path):
    texts = [f"{i % 70}" for i in range(100)]
    with SeenDigests(tmp_path, 0) as seen:
        for i, text in enumerate(texts, start=1):
            seen.is_duplicate(digest(text), i)
        seen.save(tmp_path / DIGESTS)
    assert [row.tobytes() for row in read_digests(tmp_path / DIGESTS, 70)] == [digest(text) for text in texts[:70]]
    with pytest.raises(UserError, match=r"digests\.bin is missing or of the wrong size: prepare this part again"):
        read_digests(tmp_path / DIGESTS, 71)
    content = bytearray((tmp_path / DIGESTS).read_bytes())
    content[100] ^= 1
    (tmp_path / DIGESTS).write_bytes(content)
    with pytest.raises(UserError, match=r"digests\.bin is damaged"):
        read_digests(tmp_path / DIGESTS, 70)


def test_memory_is_bounded(tmp_path, monkeypatch):
    """Python's part of it; SQLite's is its cache, which the pragma bounds."""
    monkeypatch.setattr("data.prepare.dedup._CACHE_KIB", 256)
    with SeenDigests(tmp_path, 0) as seen:
        assert seen._database.execute("PRAGMA cache_size").fetchone() == (-256,)
        peaks = []
        for begin in (0, 10_000):
            tracemalloc.start()
            for i in range(begin, begin + 10_000):
                seen.is_duplicate(hashlib.md5(str(i).encode()).digest(), i)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        seen.commit()
    assert max(peaks) < 50_000
    assert os.path.getsize(tmp_path / "dedup.sqlite") > 10 * max(peaks)
