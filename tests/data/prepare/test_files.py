"""Which files are read: those that a path names, and nothing that we or others wrote for another purpose."""

import os
from pathlib import Path

import pytest

from common.settings import UserError
from data.prepare.files import matches
from data.prepare.items import Unreadable
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


def test_own_output_is_not_read(command, folder):
    """Whatever was made below the path before, and again after a stop, or by the same command once more."""
    options = ["data=text", "data.path=.", "tokenizer=bytes", "workers=1", "out_dir=out"]
    printed = [command("scripts/prepare_data", *options) for _ in range(2)]
    assert [result.status for result in printed] == [0, 0], printed
    assert read_manifest(Path("out")).inputs == ["./notes.txt"]
    first, again = (" ".join(result.out.split()) for result in printed)
    assert "left out of data.path=.: ./begun (a run), ./dataset (a dataset), " in first
    assert f"and {len(NOT_TEXT) - 4} more" in first
    assert "out is already prepared" in again


@pytest.mark.parametrize("pattern", [".", "**/*", "*/*.json*", "*.p*", "run", "saved"])
def test_what_is_left_out_is_named(folder, pattern):
    left_out = {}
    assert [path for path in matches(pattern, left_out) if not path.endswith("notes.txt")] == []
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
    os.mkfifo("pipe")
    Path("loop").symlink_to(".")
    Path("itself").symlink_to("itself")
    Path("device").symlink_to("/dev/zero")
    os.mkfifo("pipe.bin")
    os.mkfifo("pipe.npy")
    source, refused = TextSource(name="text", path="."), {}
    for raw in (*source.documents(), *TokenSource(name="tokens", path=".").documents()):
        try:
            assert source.parse(raw).content == "a"
        except Unreadable as error:
            refused.setdefault(str(error), set()).add(raw.position.input)
    names = ["device", "itself", "pipe", "pipe.bin", "pipe.npy"]
    assert refused == {"not a regular file": {f"./{name}" for name in names}}
    with pytest.raises(UserError, match=r"data\.path= matches no file that data=text reads"):
        TextSource(name="text", path="").inputs()
    for path in ("pipe", "/dev/zero"):
        with pytest.raises(UserError, match=rf"data\.path={path} is a pipe, .*write its content to a file"):
            TextSource(name="text", path=path).inputs()
