"""Spans: their documents, sets and bytes."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
from test_prepare import contents, texts

from common.settings import decode
from data.loader import TrainBatches, open_rows
from data.prepare.dataset import prepare
from data.prepare.verify import verify
from data.shards import TokenStream, read_manifest


@pytest.fixture
def files(tmp_path):
    """Eight files: 400 documents of four sets, some unreadable; an empty file, one of blank lines."""
    rng = random.Random(0)
    lines = [
        json.dumps({"text": f"{i} " + "word " * rng.randrange(9), "meta": {"pile_set_name": rng.choice("ABCD")}})
        for i in range(400)
    ]
    lines += ["{"] * 9
    rng.shuffle(lines)
    for i in range(8):
        (tmp_path / f"{(i + 3) % 8}.jsonl").write_text("\n".join(lines[i::6]) if i < 6 else "\n\n" * (i - 6))
    return str(tmp_path / "*.jsonl")


@pytest.fixture
def make(files, config, corpus, tmp_path):
    """Prepares the files into a folder of tmp_path."""
    corpus.unlink()

    def prepare_into(folder, **changes):
        usual = {"data": {"name": "jsonl", "path": files}, "val_fraction": 0.2, "shard_tokens": 700}
        return prepare(config(**usual | {"out_dir": str(tmp_path / folder)} | changes))

    return prepare_into


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_makes_the_same_bytes(make, tmp_path, workers):
    whole = make("whole")
    assert make("out", workers=workers) == whole
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()
    assert whole.skipped == {"empty file": 1, "malformed JSON": 9}
    assert len(whole.splits["train"].shards) > 3
    assert verify(tmp_path / "out") == []


def test_sets_get_their_numbers_in_the_order_of_the_whole_input(make, tmp_path):
    manifest = make("out")
    maps = {tuple(shard.sets) for split in manifest.splits.values() for shard in split.shards}
    assert len(maps) > 3, "spans met the sets in different orders"
    assert sorted(manifest.set_names) == list("ABCD")
    assert manifest.fingerprint == make("again").fingerprint
    raw = manifest.model_dump()
    shard = raw["splits"]["train"]["shards"][0]
    shard["sets"] = [*shard["sets"][1:], shard["sets"][0]]
    assert decode(type(manifest), raw).fingerprint != manifest.fingerprint, "the maps are in it"


@pytest.mark.parametrize("val_tokens", [200])
def test_val_tokens_may_end_in_any_span(make, tmp_path, val_tokens):
    make("out", val_tokens=val_tokens, val_fraction=None, shard_tokens=300)
    written = [len(text) + 1 for text in texts(tmp_path / "out", "val")]
    assert sum(written[:-1]) < val_tokens <= sum(written)


GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "dataset"


def joined(folder, split):
    manifest = read_manifest(folder)
    stream = TokenStream(folder, manifest, split)
    return stream.read(0, stream.n_tokens)


def digests(folder):
    return {split: hashlib.sha256(joined(folder, split).tobytes()).hexdigest() for split in ("train", "val")}


@pytest.fixture
def golden(config, monkeypatch):
    """Prepares the golden files, as they were prepared when their digests were recorded."""
    monkeypatch.chdir(GOLDEN)

    def prepare_into(folder, **changes):
        usual = {"data": {"name": "jsonl", "path": "*.jsonl"}, "val_fraction": 0.2, "shard_tokens": 500}
        prepare(config(**usual | {"out_dir": str(folder)} | changes))
        return folder

    return prepare_into


def test_the_bytes_of_a_dataset_and_of_its_batches_are_those_recorded(golden, tmp_path):
    """So a run goes on with the same text."""
    recorded = json.loads((GOLDEN / "recorded.json").read_text())
    out = golden(tmp_path / "out")
    manifest = read_manifest(out)
    assert (digests(out), manifest.fingerprint) == (recorded["streams"], recorded["fingerprint"])
    assert digests(golden(tmp_path / "val", val_fraction=None, val_tokens=700)) == recorded["val_tokens=700"]
    for name, weights in (("as it is", None), ("mixed", {"Web": 2, "Code": 0.5, "Books": 0})):
        batches = TrainBatches(open_rows(TokenStream(out, manifest, "train"), 16), 4, seed=3)
        if weights:
            batches.mix(weights)
        content = b"".join(np.stack(batches.batch(step)).tobytes() for step in range(40))
        assert hashlib.sha256(content).hexdigest() == recorded["batches"][name]
