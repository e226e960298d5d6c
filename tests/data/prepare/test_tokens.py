"""Ids made elsewhere: files as other projects write them, read back through the loader."""

import json

import numpy as np
import pytest

from common.settings import UserError, decode
from data.loader import open_eval_batches
from data.prepare.dataset import PrepareConfig, prepare_dataset
from data.prepare.items import OUT_OF_RANGE
from data.prepare.verify import verify_dataset
from data.shards import Counts, TokenStream
from data.tokenizers.build import load_tokenizer

N = 257
END = 256


def llm_c(path, ids, magic=20240520, version=1, dtype=np.uint16):
    """As write_datafile in llm.c's dev/data/data_common.py, and in modded-nanogpt's fineweb.py."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + np.array(ids, dtype=dtype).tobytes())


def llama_3(path, ids):
    llm_c(path, ids, 20240801, 7, np.uint32)


def nano_gpt(path, ids):
    """As nanoGPT's data/openwebtext/prepare.py."""
    np.array(ids, np.uint16).tofile(path)


def numpy_file(path, ids):
    np.save(path, np.array(ids, ">i8"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def prepared(folder):
    """Prepares the folder, and returns the manifest and the ids of each split."""

    def build(dtype="uint16", out="out", tokenizer=(("name", "bytes"),), **changes):
        data = {"name": "tokens", "path": str(folder), "dtype": dtype}
        out_dir = folder.with_name(out)
        raw = {"data": data, "tokenizer": dict(tokenizer), "out_dir": str(out_dir), "workers": 1}
        manifest = prepare_dataset(decode(PrepareConfig, raw | changes))
        assert verify_dataset(out_dir) == []
        found = {}
        for split in ("train", "val"):
            stream = TokenStream(out_dir, manifest, split)
            found[split] = stream.read(0, stream.n_tokens).tolist()
        return manifest, found

    return build


def documents(seed, n=40, first=False):
    """Ids of documents that end, or begin, with END."""
    rng = np.random.default_rng(seed)
    ids = []
    for _ in range(n):
        text = rng.integers(0, END, rng.integers(1, 30)).tolist()
        ids += [END, *text] if first else [*text, END]
    return ids


@pytest.mark.parametrize(
    ("write", "name", "first"),
    [
        (llm_c, "fineweb_{}_000000.bin", False),
        (llama_3, "tiny_shakespeare_{}.bin", True),
        (nano_gpt, "{}.bin", True),
        (numpy_file, "{}.npy", False),
    ],
)
def test_shards_of_every_format_come_back_as_they_are(folder, prepared, write, name, first, monkeypatch):
    # Ids that are read at once: documents cross them.
    monkeypatch.setattr("data.prepare.tokens._LONGEST", 100)
    splits = {"train": documents(1, first=first), "val": documents(2, 3, first)}
    for split, ids in splits.items():
        write(folder / name.format(split), ids)
    manifest, found = prepared(shard_tokens=200)
    for split, ids in splits.items():
        ended = ids if ids[-1] == END else [*ids, END]
        assert found[split] == ended
        assert manifest.splits[split].total.documents == ended.count(END)
    stream = TokenStream(folder.with_name("out"), manifest, "val")
    batches = open_eval_batches(stream, 8)
    windows, targets = batches.rows(0, len(batches))
    assert windows[:, 0].tolist() == ended[:-1:8]
    assert targets[0].tolist() == ended[1:9]


def test_rows_are_documents_and_so_are_streams_without_an_end(folder, prepared, monkeypatch):
    monkeypatch.setattr("data.prepare.tokens._LONGEST", 8)
    np.save(folder / "rows.npy", np.arange(6, dtype=np.uint8).reshape(2, 3))
    nano_gpt(folder / "val.bin", range(10))
    _, found = prepared()
    assert found == {"train": [0, 1, 2, END, 3, 4, 5, END], "val": [*range(8), END, 8, 9, END]}


@pytest.mark.parametrize("changes", [{"val_fraction": 0.5}, {"val_tokens": 300}, {}], ids=str)
def test_documents_are_split_by_their_ids_if_no_file_or_a_setting_says_how(folder, prepared, changes):
    ids = documents(1)
    short = ids[: ids.index(END) + 1]
    nano_gpt(folder / ("val.bin" if changes else "interval_valued.bin"), ids)
    nano_gpt(folder / "valley.bin", short)
    _, found = prepared(**changes)
    assert min(map(len, found.values())) > 0
    assert sorted(found["train"] + found["val"]) == sorted(ids + short)


WHOLE = np.array([1, 2, END], np.uint16).tobytes()


def header(*values):
    return np.array([*values, *[0] * (256 - len(values))], np.int32).tobytes()


@pytest.mark.parametrize(
    ("name", "content", "reason", "number"),
    [
        ("a.bin", np.array([1, END, N, END, 3], np.uint16).tobytes(), OUT_OF_RANGE, 2),
        ("a.bin", WHOLE + b"\0", "size is not a multiple of 2 bytes", 1),
        ("a.bin", b"", "empty file", 1),
        ("a.bin", header(20240520, 1, 4) + WHOLE, "header does not match the file's size", 1),
        ("a.bin", header(20240522, 1, 3) + WHOLE, "a header of another version", 1),
        ("a.npy", b"\x93NUMPY\x01\x00", "damaged .npy file, or not of numbers", 1),
    ],
)
def test_what_is_no_token_file_is_counted(folder, prepared, name, content, reason, number):
    (folder / name).write_bytes(content)
    for split in ("train", "val"):
        nano_gpt(folder / f"{split}.bin", [1, 2, END])
    manifest, found = prepared()
    (skipped,) = manifest.skipped
    assert skipped.startswith(reason)
    assert found["train"][-3:] == found["val"] == [1, 2, END]
    with pytest.raises(UserError, match=rf"{name}:{number}: {reason}"):
        prepared(out="other", on_error="stop")


def test_the_type_of_ids_without_a_header_is_given(folder, prepared):
    for split in ("train", "val"):
        np.arange(END, dtype=np.uint32).tofile(folder / f"{split}.bin")
    _, found = prepared("uint32")
    assert found == {"train": [*range(N)], "val": [*range(N)]}, "END is added"
    with pytest.raises(UserError, match=r"give .*data\.dtype=uint16"):
        prepared(None, out="wrong")
    with pytest.raises(UserError, match=r"give .*the tokenizer and the data\.dtype that made the"):
        prepared("int64", out="wrong")


def test_ids_of_characters_are_text(folder, prepared):
    """As nanoGPT's shakespeare_char writes them; docs/data.md makes the table of its meta.pkl."""
    text = "hello world\n"
    characters = sorted(set(text))
    table = folder.with_name("characters.json")
    table.write_text(json.dumps({"characters": characters}))
    for split in ("train", "val"):
        nano_gpt(folder / f"{split}.bin", [characters.index(character) for character in text])
    manifest, found = prepared(tokenizer={"name": "ids", "path": str(table)})
    assert manifest.splits["val"].total == Counts(tokens=13, documents=1, utf8_bytes=12)
    tokenizer = load_tokenizer(folder.with_name("out") / "tokenizer.json")
    assert tokenizer.decode_bytes(found["train"]).decode() == text + "<|endoftext|>"
    assert tokenizer.encode(text) == found["train"][:-1]
    with pytest.raises(UserError, match="tokenizer=ids has no character 'x': leave it out"):
        tokenizer.encode("xo")


def test_ids_of_an_unknown_tokenizer_have_a_loss_per_token_and_no_samples(tmp_path, folder, prepared, command):
    ids = (np.arange(3000) % 1000).tolist()
    for split in ("train", "val"):
        nano_gpt(folder / f"{split}.bin", ids)
    manifest, found = prepared(tokenizer={"name": "ids", "n_vocab": 1000})
    assert found["train"] == [*ids, 1000]
    assert manifest.splits["train"].total.utf8_bytes == 0
    model = ["model.n_layer=1", "model.n_embd=16", "model.n_head=2", "seq_len=16"]
    run = [f"dataset_dir={tmp_path / 'out'}", f"run_dir={tmp_path / 'run'}", "max_steps=2"]
    schedule = ["batch_tokens=64", "schedule.warmup_steps=1"]
    trained = command("train", "experiment=quickstart", *model, *run, *schedule)
    assert trained.status == 0, trained.err
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert json.loads(text.splitlines()[-1])["val_loss"] > 0
    assert '"sample"' not in text
    assert "val_bits_per_byte" not in text
    with pytest.raises(UserError, match=r"tokenizer\.path=FILE or tokenizer\.n_vocab=NUMBER"):
        prepared(tokenizer={"name": "ids"}, out="none")
