import json

import pytest
from shard_files import write_shards

from common.files import write_json
from common.settings import decode
from data.prepare.dataset import PrepareConfig
from data.shards import Counts, Manifest, Split, TokenizerId, TokenStream


@pytest.fixture
def corpus(tmp_path):
    """200 different documents of two sets, as .jsonl."""
    path = tmp_path / "corpus.jsonl"
    lines = [
        json.dumps({"text": f"document {i} " + "xyz\n" * (i % 7), "meta": {"pile_set_name": "AB"[i % 2]}})
        for i in range(200)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def config(corpus, tmp_path):
    """Builds a PrepareConfig of the corpus and one process, with other settings where the test gives them."""

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
    """Writes a split with these documents (lists of ids) and opens it."""

    def make(*documents, n_vocab=1000, shard_tokens=10**9):
        for path in tmp_path.glob("train-*"):
            path.unlink()
        shards = write_shards(tmp_path, "train", documents, n_vocab, shard_tokens)
        tokens = sum(map(len, documents))
        counts = Counts(tokens=tokens, documents=len(documents), utf8_bytes=tokens)
        manifest = Manifest(
            tokenizer=TokenizerId(name="bytes", n_vocab=n_vocab, sha256="0" * 64, eot_id=n_vocab - 1),
            inputs=["corpus.txt"],
            set_names=["set"],
            splits={"train": Split(sets={"set": counts}, shards=shards), "val": Split(sets={}, shards=[])},
            skipped={},
            prepared={},
        )
        write_json(tmp_path / "manifest.json", manifest.model_dump(mode="json"))
        return TokenStream(tmp_path, manifest, "train")

    return make
