"""Which files are read: those that a path names, and nothing that we or others wrote for another purpose."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from test_prepare import texts

from common.settings import UserError
from data.prepare.dataset import prepare_dataset
from data.prepare.files import TEST, VALIDATION, find_files, find_named_files
from data.prepare.sources import TextSource
from data.prepare.tokens import TokenSource
from data.shards import read_manifest

NOTE = "".join(f"Line {i} of a note.\n" for i in range(6000))  # several documents
NOT_TEXT = {  # folders and files that are left out, by what is in them
    "dataset": ["manifest.json", "train-00000.bin", "tokenizer.json"],
    "killed.partial": ["task-00000.lock"],
    "run": ["config.json", "metrics.jsonl", "checkpoints/step-1/model.safetensors"],
    "begun": ["run.lock"],
    "export": ["config.json", "model.safetensors"],
    "sharded": ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"],
    "saved": ["dataset_info.json", "state.json", "data-00000-of-00001.arrow"],
    "sweep": ["multirun.yaml", "0/samples.txt"],
    "tokenizer.json": None,
    "gpt2.tiktoken": None,
    "a.parquet": None,
    "b.ARROW": None,
    "c.csv": None,
}
SPLITS = ["train", "validation", "test"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory: one note, and everything that is left out."""
    folder = tmp_path / "folder"
    for name, files in NOT_TEXT.items():
        for path in [folder / name] if files is None else [folder / name / file for file in files]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(NOTE[::-1])
    (folder / "notes.txt").write_text(NOTE)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("source", "layout"),
    [
        ("jsonl", "{}.jsonl"),
        ("jsonl", "{}/part-0.jsonl"),
        ("text", "wiki.{}.txt"),
        ("text", "data/{}/1.txt"),
        ("hf", "{}.csv"),
        ("hf", "data/{}-00000-of-00001.parquet"),
        ("tokens", "corpus_{}_000000.bin"),
    ],
)
def test_files_that_are_named_for_a_split_are_that_split(config, tmp_path, capsys, source, layout):
    folder = tmp_path / "in"
    for split in SPLITS:
        write_documents(folder / layout.format(split), [f"{split} {i}" for i in range(5)])
    data = {"name": source, "path": str(folder)} | ({"dtype": "uint16"} if source == "tokens" else {})
    manifest = prepare_dataset(config(data=data, val_fraction=None))
    assert {text.split()[0] for text in texts(tmp_path / "out", "train")} == {"train"}
    assert {text.split()[0] for text in texts(tmp_path / "out", "val")} == {"validation"}
    assert manifest.prepared["val_inputs"] == [str(folder / layout.format("validation"))]
    printed = " ".join(capsys.readouterr().out.split())
    assert f"left out of data.path={folder}: {folder / layout.format('test')} (test split)" in printed
    by_hash = prepare_dataset(config(data=data, out_dir=str(tmp_path / "all"), val_fraction=0.3))
    assert len(by_hash.inputs) == 2
    assert "val_inputs" not in by_hash.prepared


def write_documents(path, documents):
    """Write texts in the format that the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"text": documents}), path)
    elif path.suffix == ".bin":
        np.array([id_ for text in documents for id_ in [*text.encode(), 256]], np.uint16).tofile(path)
    elif path.suffix == ".csv":
        path.write_text("\n".join(["text", *documents]) + "\n")
    else:
        path.write_text(lines if path.suffix == ".jsonl" else "\n".join(documents))


def test_other_names_and_single_files_are_no_splits():
    names = ["test_model.py", "tests/a.txt", "test-report.txt", "interval.bin", "validity.txt", "contest.jsonl"]
    assert find_named_files(TEST, ["train.txt", *names]) == find_named_files(VALIDATION, ["train.txt", *names]) == []
    assert find_named_files(TEST, ["here/test.jsonl"]) == []
    assert find_named_files(TEST, ["test/a.txt", "test/b.txt"]) == []


@pytest.mark.parametrize("source", ["jsonl", "hf"])
def test_a_file_that_is_not_read_is_named(config, tmp_path, monkeypatch, capsys, source):
    write_documents(tmp_path / "in" / "a.jsonl", ["a", "b", "c"])
    (tmp_path / "in" / "more.docx").write_text("more")
    monkeypatch.chdir(tmp_path)
    assert prepare_dataset(config(data={"name": source, "path": "in"})).inputs == ["in/a.jsonl"]
    assert ": in/more.docx (not of data=" in " ".join(capsys.readouterr().out.split())


def test_a_log_among_texts_is_left_out_and_named(config, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for i in range(3):
        (tmp_path / "in" / f"{i}.py").write_text(f"print({i})\n")
    (tmp_path / "in" / "log.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(500)))
    (tmp_path / "in" / "package.json").write_text('{\n  "name": "a"\n}\n')
    manifest = prepare_dataset(config(data={"name": "text", "path": str(tmp_path / "in")}))
    assert manifest.skipped == {"JSON without the text_field": 2}
    assert "log.jsonl:1 with 'step')" in " ".join(capsys.readouterr().out.split())
    assert len(texts(tmp_path / "out", "train") + texts(tmp_path / "out", "val")) == 3


def test_own_output_is_not_read(command, folder):
    """Whatever was made below the path before, and again after a stop, or by the same command once more."""
    options = ["data=text", "data.path=.", "tokenizer=bytes", "workers=1", "out_dir=out"]
    printed = [command("scripts/prepare_data", *options) for _ in range(2)]
    assert [result.status for result in printed] == [0, 0], printed
    assert read_manifest(Path("out")).inputs == ["./notes.txt"]
    first, again = (" ".join(result.out.split()) for result in printed)
    assert "left out of data.path=.: ./begun, ./run (a run); ./dataset (a dataset); " in first
    assert first.count("left out of") == 1
    assert "out is already prepared" in again


@pytest.mark.parametrize("pattern", [".", "**/*", "*/*.json*", "*.p*", "run", "saved"])
def test_what_is_left_out_is_named(folder, pattern):
    left_out = {}
    assert [path for path in find_files(pattern, left_out) if not path.endswith("notes.txt")] == []
    assert {os.path.normpath(path) for path in left_out} <= set(NOT_TEXT)
    if pattern in (".", "**/*"):
        assert {os.path.normpath(path) for path in left_out} == set(NOT_TEXT)
    if pattern in ("*.p*", "run", "saved"):
        why = r"data=text reads; left out: (a\.parquet \(Parquet: use data=hf|saved \(.*use data=hf|run \(a run)\)"
        with pytest.raises(UserError, match=why):
            TextSource(name="text", path=pattern).inputs()


def test_a_file_that_is_named_is_read_wherever_it_is(folder):
    assert list(TextSource(name="text", path="run/config.json").inputs()) == ["run/config.json"]


def test_an_out_dir_in_the_folder_that_the_library_datasets_reads_is_refused(config, folder):
    with pytest.raises(UserError, match=r"out_dir=out is in data\.path=\., which is read: choose one outside"):
        config(data={"name": "hf", "path": "."}, out_dir="out")


def test_only_regular_files_are_read(tmp_path, monkeypatch):
    """A pipe would block; links may loop."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a")
    Path("loop").symlink_to(".")
    Path("itself").symlink_to("itself")
    Path("device").symlink_to("/dev/zero")
    for name in ("pipe", "pipe.bin", "pipe.npy"):
        os.mkfifo(name)
    found = {}
    for source in (TextSource(name="text", path="."), TokenSource(name="tokens", path=".")):
        for raw in source.documents([*source.inputs()]):
            found[raw.position.input] = str(raw.content)
    assert found.pop("./a.txt") == "a"
    assert sorted(found) == ["./device", "./itself", "./pipe", "./pipe.bin", "./pipe.npy"]
    assert set(found.values()) == {"not a regular file"}
    with pytest.raises(UserError, match=r"data\.path= matches no file that data=text reads"):
        TextSource(name="text", path="").inputs()
