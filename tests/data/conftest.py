import json

import pytest
from shard_files import write_shards

from common.files import write_json
from common.settings import decode
from data.prepare.dataset import PrepareConfig
from data.shards import Counts, Manifest, Split, TokenStream
from data.tokenizers.interface import TokenizerId


@pytest.fixture
def corpus(tmp_path):
    """200 different documents of two sets, as .jsonl."""
    path = tmp_path / "corpus.jsonl"
    with path.open("w") as file:
        for i in range(200):
            text = f"document {i} " + "xyz\n" * (i % 7)
            record = {"text": text, "meta": {"pile_set_name": "AB"[i % 2]}}
            file.write(json.dumps(record) + "\n")
    return path


@pytest.fixture
def config(corpus, tmp_path):
    """Builds a PrepareConfig of the corpus and one process, with a test's other settings."""

    def build(**changes):
        raw = {
            "data": {"name": "jsonl", "path": str(corpus)},
            "tokenizer": {"name": "bytes"},
            "out_dir": str(tmp_path / "out"),
            "val_fraction": 0.1,
            "workers": 1,
        }
        return decode(PrepareConfig, raw | changes)

    return build


@pytest.fixture
def make_stream(tmp_path):
    """Writes a split with these documents (lists of ids, each of a set) and opens it."""

    def make(*documents, sets=None, set_names=("set",), n_vocab=1000, shard_tokens=10**9):
        for path in tmp_path.glob("train-*"):
            path.unlink()
        sets = sets or [0] * len(documents)
        shards = write_shards(tmp_path, "train", documents, n_vocab, shard_tokens, sets)
        counts = Counts(tokens=1, documents=1, utf8_bytes=1)  # of a set: not read here
        train = Split(sets=dict.fromkeys(set_names[: 1 + max(sets)], counts), shards=shards)
        tokenizer = TokenizerId(name="bytes", n_vocab=n_vocab, sha256="0" * 64, eot_id=n_vocab - 1)
        manifest = Manifest(
            tokenizer=tokenizer,
            inputs=["corpus.txt"],
            set_names=[*set_names],
            splits={"train": train, "val": Split(sets={}, shards=[])},
            skipped={},
            prepared={},
        )
        write_json(tmp_path / "manifest.json", manifest.model_dump(mode="json"))
        return TokenStream(tmp_path, manifest, "train")

    return make
