"""Spans of any number of tasks, which finish in any order, are the dataset of one machine."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
from test_prepare import contents, texts

import data.prepare.dataset
import data.prepare.spans
from common.settings import UserError, decode
from data.loader import TrainBatches
from data.prepare.dataset import prepare
from data.prepare.verify import verify
from data.shards import TokenStream, read_manifest


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Eight files in seven sections: 400 documents of four sets, some unreadable; an empty file, one of blank lines."""
    monkeypatch.setattr(data.prepare.spans, "_SECTION_BYTES", 1)
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
    """Prepares the files, or a task's share of them, into a folder of tmp_path."""
    corpus.unlink()

    def prepare_into(folder, **changes):
        usual = {"data": {"name": "jsonl", "path": files}, "val_fraction": 0.2, "shard_tokens": 700}
        return prepare(config(**usual | {"out_dir": str(tmp_path / folder)} | changes))

    return prepare_into


ORDERS = [(1, [0]), (2, [1, 0]), (7, [6, 2, 0, 5, 1, 4, 3])]


@pytest.mark.parametrize(("num_tasks", "order"), ORDERS, ids=str)
def test_tasks_in_any_order_make_the_bytes_of_one_machine(make, tmp_path, capsys, num_tasks, order):
    whole = make("whole")
    made = [make("out", num_tasks=num_tasks, task_index=i, workers=1 + i % 3) for i in order]
    assert made == [None] * (num_tasks - 1) + [whole]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()
    assert capsys.readouterr().out.count(f"{tmp_path / 'out'} is ready when all are") == num_tasks - 1
    assert whole.skipped == {"empty file": 1, "malformed JSON": 9}
    assert len(whole.splits["train"].shards) > 10
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


def test_val_tokens_may_end_in_any_span_of_the_first_group(make, tmp_path):
    val_tokens = 800
    settings = {"val_tokens": val_tokens, "val_fraction": None, "shard_tokens": 300}
    make("whole", **settings)
    for i in (2, 0, 1):
        make("out", **settings, num_tasks=3, task_index=i)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    written = [len(text) + 1 for text in texts(tmp_path / "out", "val")]
    assert sum(written[:-1]) < val_tokens <= sum(written)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tasks": 3, "task_index": 3}, "task_index=3 is out of range: give one from 0 to 2"),
        ({"num_tasks": 8}, "num_tasks=8 is more than the sections of 1 GiB .*: use at most num_tasks=7"),
        ({"num_tasks": 2, "data": {"name": "pile", "path": "x"}}, "num_tasks=2 is more than .*at most num_tasks=1"),
    ],
)
def test_shares_that_cannot_be(make, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        make("out", **changes)
    assert not (tmp_path / "out.partial").exists()


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
        batches = TrainBatches(TokenStream(out, manifest, "train"), 16, 4, seed=3)
        if weights:
            batches.mix(out, manifest, weights)
        content = b"".join(np.stack(batches.batch(step)).tobytes() for step in range(40))
        assert hashlib.sha256(content).hexdigest() == recorded["batches"][name]
