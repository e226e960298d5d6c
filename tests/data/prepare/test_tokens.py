"""Ids made elsewhere: files as other projects write them, read back through the loader."""

import json

import numpy as np
import pytest

from common.settings import UserError, decode
from data.loader import eval_batches
from data.prepare.dataset import PrepareConfig, prepare
from data.prepare.items import OUT_OF_RANGE
from data.prepare.verify import verify
from data.shards import Counts, TokenStream, read_manifest
from data.tokenizer import load_tokenizer

N, END = 257, 256


def llm_c(path, ids, magic=20240520, version=1, dtype=np.uint16):
    """As write_datafile in llm.c's dev/data/data_common.py, and in modded-nanogpt's data/fineweb.py."""
    header = np.zeros(256, dtype=np.int32)
    header[0], header[1], header[2] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + np.array(ids, dtype=dtype).tobytes())


def llama_3(path, ids):
    llm_c(path, ids, 20240801, 7, np.uint32)


def nano_gpt(path, ids):
    """As nanoGPT's data/openwebtext/prepare.py."""
    array = np.memmap(path, dtype=np.uint16, mode="w+", shape=(len(ids),))
    array[:] = ids
    array.flush()


def prepared(tmp_path, **changes):
    raw = {
        "data": {"name": "tokens", "path": str(tmp_path / "in"), "dtype": "uint16"} | changes.pop("data", {}),
        "tokenizer": {"name": "bytes"},
    }
    prepare(decode(PrepareConfig, raw | {"out_dir": str(tmp_path / "out"), "workers": 1} | changes))
    manifest = read_manifest(tmp_path / "out")
    assert verify(tmp_path / "out") == []
    streams = {name: TokenStream(tmp_path / "out", manifest, name) for name in ("train", "val")}
    return manifest, {name: stream.read(0, stream.n_tokens).tolist() for name, stream in streams.items()}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def documents(seed, n=40, first=False):
    """Ids of documents that end, or begin, with END."""
    rng = np.random.default_rng(seed)
    each = [rng.integers(0, END, rng.integers(1, 30)).tolist() for _ in range(n)]
    return [token for ids in each for token in ([END, *ids] if first else [*ids, END])]


@pytest.mark.parametrize(
    ("write", "name", "first"),
    [
        (llm_c, "fineweb_{}_000000.bin", False),
        (llama_3, "tiny_shakespeare_{}.bin", True),
        (nano_gpt, "{}.bin", True),
        (lambda path, ids: np.save(path, np.array(ids, ">i8")), "{}.npy", False),
    ],
)
def test_shards_of_every_format_come_back_as_they_are(tmp_path, folder, write, name, first, monkeypatch):
    monkeypatch.setattr("data.prepare.tokens._LONGEST", 100)  # ids that are read at once: documents cross them
    splits = {"train": documents(1, first=first), "val": documents(2, 3, first)}
    for split, ids in splits.items():
        write(folder / name.format(split), ids)
    manifest, found = prepared(tmp_path, shard_tokens=200)
    ended = {split: ids if ids[-1] == END else [*ids, END] for split, ids in splits.items()}
    assert found == ended
    assert {split: manifest.splits[split].total.documents for split in ended} == {
        split: ids.count(END) for split, ids in ended.items()
    }
    stream = TokenStream(tmp_path / "out", manifest, "val")
    batches = eval_batches(stream, 8)
    windows, targets = batches.rows(0, len(batches))
    assert [*windows[:, 0].tolist(), *targets[0].tolist()] == [*ended["val"][:-1:8], *ended["val"][1:9]]


def test_rows_are_documents_and_so_are_streams_without_an_end(tmp_path, folder, monkeypatch):
    monkeypatch.setattr("data.prepare.tokens._LONGEST", 8)
    np.save(folder / "rows.npy", np.arange(6, dtype=np.uint8).reshape(2, 3))
    nano_gpt(folder / "val.bin", range(10))
    _, found = prepared(tmp_path)
    assert found == {"train": [0, 1, 2, END, 3, 4, 5, END], "val": [*range(8), END, 8, 9, END]}


@pytest.mark.parametrize("changes", [{"val_fraction": 0.5}, {"val_tokens": 300}, {}], ids=str)
def test_documents_are_split_by_their_ids_if_no_file_or_a_setting_says_how(tmp_path, folder, changes):
    ids = documents(1)
    nano_gpt(folder / ("val.bin" if changes else "interval_valued.bin"), ids)
    nano_gpt(folder / "valley.bin", ids[: ids.index(END) + 1])
    _, found = prepared(tmp_path, **changes)
    assert found["train"]
    assert found["val"]
    assert sorted(found["train"] + found["val"]) == sorted([*ids, *ids[: ids.index(END) + 1]])


def of(*values):
    return np.array(values, np.uint16).tobytes()


def header(*values):
    return np.array([*values, *[0] * (256 - len(values))], np.int32).tobytes()


WHOLE = of(1, 2, END)


@pytest.mark.parametrize(
    ("name", "content", "reason", "number"),
    [
        ("a.bin", of(1, END, N, END, 3), OUT_OF_RANGE, 2),
        ("a.bin", WHOLE + b"\0", "size is not a multiple of 2 bytes", 1),
        ("a.bin", b"", "empty file", 1),
        ("a.bin", header(20240520, 1, 4) + WHOLE, "header does not match the file's size", 1),
        ("a.bin", header(20240522, 1, 3) + WHOLE, "a header of another version, or not of tokens", 1),
        ("a.npy", b"\x93NUMPY\x01\x00", "damaged .npy file, or not of numbers", 1),
    ],
)
def test_what_is_no_token_file_is_counted(tmp_path, folder, name, content, reason, number):
    (folder / name).write_bytes(content)
    for split in ("train", "val"):
        nano_gpt(folder / f"{split}.bin", [1, 2, END])
    manifest, found = prepared(tmp_path)
    assert manifest.skipped == {reason: 1}
    assert found["train"][-3:] == found["val"] == [1, 2, END]
    with pytest.raises(UserError, match=rf"{name}:{number}: {reason}: "):
        prepared(tmp_path, out_dir=str(tmp_path / "other"), on_error="stop")


def test_the_type_of_ids_without_a_header_is_given(tmp_path, folder):
    for split in ("train", "val"):
        np.arange(END, dtype=np.uint32).tofile(folder / f"{split}.bin")
    assert prepared(tmp_path, data={"dtype": "uint32"})[1] == {"train": [*range(N)], "val": [*range(N)]}  # END is added
    for dtype, remedy in (
        (None, r"data\.dtype=uint16"),
        ("int64", r"the tokenizer and the data\.dtype that made the ids"),
    ):
        with pytest.raises(UserError, match=f"give .*{remedy}"):
            prepared(tmp_path, data={"dtype": dtype}, out_dir=str(tmp_path / "wrong"))


def test_ids_of_characters_are_text(tmp_path, folder):
    """As nanoGPT's data/shakespeare_char/prepare.py writes them; docs/data.md makes the table from its meta.pkl."""
    text = "hello world\n"
    characters = sorted(set(text))
    (tmp_path / "characters.json").write_text(json.dumps({"characters": characters}))
    for split in ("train", "val"):
        nano_gpt(folder / f"{split}.bin", [characters.index(character) for character in text])
    manifest, found = prepared(tmp_path, tokenizer={"name": "ids", "path": str(tmp_path / "characters.json")})
    assert manifest.splits["val"].total == Counts(tokens=13, documents=1, utf8_bytes=12)
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    assert tokenizer.decode_bytes(found["train"]).decode() == text + "<|endoftext|>"
    assert tokenizer.encode(text) == found["train"][:-1]
    with pytest.raises(UserError, match="tokenizer=ids has no character 'x': leave it out"):
        tokenizer.encode("xo")


def test_ids_of_an_unknown_tokenizer_have_a_loss_per_token_and_no_samples(tmp_path, folder, command):
    for split in ("train", "val"):
        nano_gpt(folder / f"{split}.bin", np.arange(3000) % 1000)
    manifest, found = prepared(tmp_path, tokenizer={"name": "ids", "n_vocab": 1000})
    assert found["train"] == [*(np.arange(3000) % 1000).tolist(), 1000]
    assert manifest.splits["train"].total.utf8_bytes == 0
    model = ["model.n_layer=1", "model.n_embd=16", "model.n_head=2"]
    run = [f"dataset_dir={tmp_path / 'out'}", f"run_dir={tmp_path / 'run'}", "max_steps=2", "seq_len=16"]
    trained = command("train", "experiment=quickstart", *model, *run, "batch_tokens=64", "schedule.warmup_steps=1")
    assert trained.status == 0, trained.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["val_loss"] > 0
    assert not {"sample", "val_bits_per_byte"} & {key for line in lines for key in line}
    with pytest.raises(UserError, match=r"tokenizer\.path=FILE or tokenizer\.n_vocab=NUMBER"):
        prepared(tmp_path, tokenizer={"name": "ids"}, out_dir=str(tmp_path / "none"))
