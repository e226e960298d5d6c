"""Which files are read: those that a path names, and nothing that we or others wrote for another purpose."""

import os
import socket
from pathlib import Path

import pytest

from common.settings import UserError
from data.prepare.dataset import prepare
from data.prepare.files import matches
from data.prepare.items import Unreadable
from data.prepare.sources import JsonlSource, TextSource
from data.prepare.tokens import TokenSource
from data.shards import read_manifest

NOTE = "".join(f"Line {i} of a note.\n" for i in range(6000))  # several documents
NOT_TEXT = {  # folders and files that are left out, by what is in them
    "dataset": ["manifest.json", "train-00000.bin", "tokenizer.json"],
    "killed.partial": ["task-00000.lock"],
    "run": ["config.json", "metrics.jsonl", "checkpoints/step-1/model.safetensors"],
    "begun": ["run.lock"],
    "step-00000010": ["manifest.json", "state.json"],
    "export": ["config.json", "model.safetensors"],
    "sharded": ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"],
    "pickled": ["config.json", "pytorch_model.bin"],
    "saved": ["dataset_info.json", "state.json", "data-00000-of-00001.arrow"],
    "splits": ["dataset_dict.json", "train/state.json"],
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


@pytest.mark.parametrize(
    "pattern", [".", "**", "**/*", "*/*.json*", "*/*/*", "*.p*", "run", "run/*.json", "a.parquet", "saved"]
)
def test_what_is_left_out_is_named(folder, pattern):
    left_out = {}
    assert [path for path in matches(pattern, left_out) if not path.endswith("notes.txt")] == []
    assert {os.path.normpath(path) for path in left_out} <= set(NOT_TEXT)
    if pattern in (".", "**", "**/*"):
        assert {os.path.normpath(path) for path in left_out} == set(NOT_TEXT)
    if pattern in ("*.p*", "run", "a.parquet", "saved"):
        why = r"data=text reads; left out: (a\.parquet \(Parquet: use data=hf|saved \(.*use data=hf|run \(a run)\)"
        with pytest.raises(UserError, match=why):
            TextSource(name="text", path=pattern).inputs()


def test_a_file_that_is_named_is_read_wherever_it_is(folder):
    assert list(TextSource(name="text", path="run/config.json").inputs()) == ["run/config.json"]


def test_a_file_with_two_names_is_read_once(config, corpus, monkeypatch):
    (corpus.parent / "link.jsonl").symlink_to(corpus)
    monkeypatch.chdir(corpus.parent)
    manifest = prepare(config(data={"name": "jsonl", "path": ["corpus.jsonl", "./corpus.jsonl", "*.jsonl"]}))
    assert sum(split.total.documents for split in manifest.splits.values()) == 200


def test_parquet_among_json_lines_is_named(folder, capsys):
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    assert list(JsonlSource(name="jsonl", path="*.*").inputs()) == ["a.jsonl", "notes.txt"]
    assert "a.parquet (Parquet: use data=hf), b.ARROW (Arrow: use data=hf)" in capsys.readouterr().out


def test_where_the_output_goes_is_not_read(folder, monkeypatch):
    log = folder / "log.txt"
    log.touch()
    realpath = os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path: str(log) if path == "/dev/fd/1" else realpath(path))
    assert list(TextSource(name="text", path="*.txt").inputs()) == ["notes.txt"]


def test_an_out_dir_in_the_folder_that_the_library_datasets_reads_is_refused(config, folder):
    with pytest.raises(UserError, match=r"out_dir=out is in data\.path=\., which is read: choose one outside"):
        config(data={"name": "hf", "path": "."}, out_dir="out")


def lock(monkeypatch):
    """Deny access to folders of this name. Root may read everything, so the refusal is simulated."""
    listdir, lstat = os.listdir, os.lstat

    def listed(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    def looked_at(path):
        if "locked/" in str(path):
            raise PermissionError(13, "Permission denied", path)
        return lstat(path)

    monkeypatch.setattr(os, "listdir", listed)
    monkeypatch.setattr(os, "lstat", looked_at)


@pytest.mark.parametrize("path", [".", "**/*.txt", "locked/*.txt", "locked/deep/*.txt"])
def test_an_unreadable_folder_is_counted(config, tmp_path, monkeypatch, path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("a", "locked", "z"):
        Path(name).mkdir()
        Path(name, "note.txt").write_text(name + NOTE)
    lock(monkeypatch)
    text = {"name": "text", "path": path}
    if path.startswith("locked"):
        with pytest.raises(UserError, match=r"the corpus is empty \(1 x unreadable folder, first locked:1\)"):
            prepare(config(data=text))
        return
    with pytest.raises(UserError, match=r"locked:1: unreadable folder: "):
        prepare(config(data=text, on_error="stop"))
    assert prepare(config(data=text)).skipped == {"unreadable folder": 1}


def test_a_file_that_may_not_be_read_is_counted(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    source = TextSource(name="text", path=str(tmp_path / "a.txt"))

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)
    (raw,) = source.documents()
    with pytest.raises(Unreadable, match="unreadable file"):
        source.parse(raw)


def test_only_regular_files_are_read(tmp_path, monkeypatch):
    """A pipe would block; links may loop."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a")
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
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
    names = ["device", "itself", "pipe", "pipe.bin", "pipe.npy", "socket"]
    assert refused == {"not a regular file": {f"./{name}" for name in names}}
    with pytest.raises(UserError, match=r"data\.path= matches no file that data=text reads"):
        TextSource(name="text", path="").inputs()
    for path in ("pipe", "/dev/zero"):
        with pytest.raises(UserError, match=rf"data\.path={path} is a pipe, .*write its content to a file"):
            TextSource(name="text", path=path).inputs()
