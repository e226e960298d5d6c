"""Exact deduplication: the first of equal texts stays, across kills, in bounded memory."""

import json
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data.prepare.join
from data.prepare.dataset import prepare
from data.prepare.encode import Batch, Encoded, Skipped, document_digest
from data.prepare.items import Position
from data.prepare.join import document_places, find_duplicates
from data.prepare.parts import ENTRY, read_parts, write_part
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


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize("at_once", [1, 7, 100, 2**23])
def test_duplicates_are_found_across_parts_and_groups(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(data.prepare.join, "_DOCUMENTS_AT_ONCE", at_once)
    rng = random.Random(0)
    texts = [str(rng.randrange(70)) for _ in range(200)]
    for number, (first, last) in enumerate([(0, 1), (1, 90), (90, 90), (90, 200)]):
        items = [Encoded(Position("a", 1), "set", 1, 1, digest(text)) for text in texts[first:last]]
        items = items or [Skipped(Position("a", 1), "malformed JSON")]
        write_part(tmp_path, number, iter([Batch(items, np.zeros(last - first, np.uint16))]))
    assert find_duplicates(read_parts(tmp_path)).tolist() == [text in texts[:i] for i, text in enumerate(texts)]


def test_a_document_is_in_a_split_by_its_digest():
    digests = [bytes(8) + b"x" * 8, b"\xff" * 16, bytes(7) + b"\x80" + bytes(8)]
    entries = np.array([(1, 0, 1, 0, 1, one) for one in digests], ENTRY)
    assert document_places(entries).tolist() == [0.0, 1.0, 0.5]
