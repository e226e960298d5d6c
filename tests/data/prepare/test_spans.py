"""Spans: their documents, sets and bytes."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
from test_prepare import contents

from data.loader import TrainBatches, open_rows
from data.prepare.dataset import prepare_dataset
from data.prepare.verify import verify_dataset
from data.shards import TokenStream, read_manifest


@pytest.fixture
def files(tmp_path):
    """Eight files: 400 documents of four sets, some unreadable; an empty file, one of blank lines."""
    rng = random.Random(0)
    lines = ["{"] * 9
    for i in range(400):
        meta = {"pile_set_name": rng.choice("ABCD")}
        lines.append(json.dumps({"text": f"{i} " + "word " * rng.randrange(9), "meta": meta}))
    rng.shuffle(lines)
    for i in range(6):
        (tmp_path / f"{(i + 3) % 8}.jsonl").write_text("\n".join(lines[i::6]))
    (tmp_path / "1.jsonl").write_text("")
    (tmp_path / "2.jsonl").write_text("\n\n")
    return str(tmp_path / "*.jsonl")


@pytest.fixture
def make(files, config, corpus, tmp_path):
    """Prepares the files into a folder of tmp_path."""
    corpus.unlink()

    def prepare_into(folder, **changes):
        usual = {"data": {"name": "jsonl", "path": files}, "val_fraction": 0.2, "shard_tokens": 700}
        return prepare_dataset(config(**usual | {"out_dir": str(tmp_path / folder)} | changes))

    return prepare_into


def test_any_number_of_workers_makes_the_same_bytes(make, tmp_path):
    whole = make("whole")
    assert make("out", workers=2) == whole
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()
    assert whole.skipped == {"empty file": 1, "malformed JSON": 9}
    assert len(whole.splits["train"].shards) > 3
    assert verify_dataset(tmp_path / "out") == []


def test_sets_get_their_numbers_in_the_order_of_the_whole_input(make, tmp_path):
    manifest = make("out")
    maps = {tuple(shard.sets) for split in manifest.splits.values() for shard in split.shards}
    assert len(maps) > 3, "spans met the sets in different orders"
    assert sorted(manifest.set_names) == list("ABCD")
    assert manifest.fingerprint == make("again").fingerprint
    fingerprint = manifest.fingerprint
    manifest.splits["train"].shards[0].sets.reverse()
    assert manifest.fingerprint != fingerprint, "the maps are in it"


GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "dataset"


def digests(folder):
    found = {}
    for split in ("train", "val"):
        stream = TokenStream(folder, read_manifest(folder), split)
        ids = stream.read(0, stream.n_tokens)
        found[split] = hashlib.sha256(ids.tobytes()).hexdigest()
    return found


def test_the_bytes_of_a_dataset_and_of_its_batches_are_those_recorded(config, tmp_path, monkeypatch):
    """So a run goes on with the same text."""
    monkeypatch.chdir(GOLDEN)
    recorded = json.loads(Path("recorded.json").read_text())
    usual = {"data": {"name": "jsonl", "path": "*.jsonl"}, "shard_tokens": 500}
    manifest = prepare_dataset(config(**usual, val_fraction=0.2))
    out = tmp_path / "out"
    assert digests(out) == recorded["streams"]
    assert manifest.fingerprint == recorded["fingerprint"]
    prepare_dataset(config(**usual, val_fraction=None, val_tokens=700, out_dir=str(tmp_path / "val")))
    assert digests(tmp_path / "val") == recorded["val_tokens=700"]
    for name, weights in (("as it is", None), ("mixed", {"Web": 2, "Code": 0.5, "Books": 0})):
        batches = TrainBatches(open_rows(TokenStream(out, manifest, "train"), 16), 4, seed=3)
        if weights:
            batches.mix(weights)
        content = b"".join(np.stack(batches.batch(step)).tobytes() for step in range(40))
        assert hashlib.sha256(content).hexdigest() == recorded["batches"][name]
