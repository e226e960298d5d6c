"""What is read: each file once, in little memory, the same for every process; and a dataset knows its whole input."""

import json
import tracemalloc

import pytest
import zstandard

from common.settings import UserError, decode
from data.prepare.archives import read_lines
from data.prepare.dataset import PrepareConfig, prepare
from data.prepare.items import Unreadable
from data.prepare.sources import parse_line


def write(path, documents):
    path.write_text("".join(json.dumps({"text": f"{path.stem} {i} " + "word " * 20}) + "\n" for i in range(documents)))


def config(tmp_path, **changes):
    raw = {
        "data": {"name": "jsonl", "path": str(tmp_path / "*.jsonl")},
        "tokenizer": {"name": "bytes"},
        "out_dir": str(tmp_path / "out"),
        "val_fraction": 0.2,
    }
    return decode(PrepareConfig, raw | changes)


def test_another_dataset_in_out_dir_is_named_in_a_line(tmp_path):
    write(tmp_path / "a.jsonl", 50)
    prepare(config(tmp_path))
    other = {"name": "text", "path": str(tmp_path)}
    with pytest.raises(UserError, match=rf"made from data=jsonl data\.path={tmp_path}/\*\.jsonl\): choose another"):
        prepare(config(tmp_path, data=other))
    for i in range(9):
        write(tmp_path / f"{i}.jsonl", 5)
    with pytest.raises(UserError, match=rf"\(made before 9 input files changed, such as {tmp_path}/0\.jsonl\): choose"):
        prepare(config(tmp_path))
    with pytest.raises(
        UserError, match=r"already holds another dataset \(made with val_fraction=.* and before 9 input"
    ):
        prepare(config(tmp_path, val_fraction=0.5))


def test_a_file_with_two_names_is_read_once(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl", 50)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    paths = ["a.jsonl", "./a.jsonl", "*.jsonl"]
    manifest = prepare(config(tmp_path, data={"name": "jsonl", "path": paths}))
    assert sum(split.total.documents for split in manifest.splits.values()) == 50


@pytest.mark.slow
def test_an_archive_of_nothing_but_ends_of_lines_takes_little_memory(tmp_path):
    path = tmp_path / "lines.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(b"\n" * 60_000_000))
    tracemalloc.start()
    assert sum(1 for _ in read_lines(path, lambda _: None)) == 60_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 250_000_000  # what one read gives, and not three lists of all its lines


@pytest.mark.parametrize("end", ["", ', "m": NaN}'])
def test_a_line_that_is_nested_too_deep_is_malformed(end):
    deep = "[" * 100_000
    with pytest.raises(Unreadable, match="malformed JSON"):
        parse_line(f'{{"q": {deep}{end}'.encode())
    assert parse_line(json.dumps({"text": deep, "m": float("nan")}).encode())["text"] == deep
