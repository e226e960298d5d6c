"""A killed run resumes when it is started again, and makes the same bytes as an uninterrupted one."""

import contextlib
import errno
import fcntl
import gzip
import os
import shutil
import signal
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from test_prepare import contents

import data.prepare.dataset
import data.prepare.encode
import data.prepare.spans
from common.settings import UserError
from data.prepare.dataset import prepare
from data.prepare.spans import SPAN
from data.prepare.verify import verify

ROOT = Path(__file__).resolve().parents[3]


def n_spans(out):
    return len(list(out.with_name("out.partial").glob("span-?????")))


@pytest.fixture
def saves_often(monkeypatch):
    """Small batches; spans are small by shard_tokens."""
    monkeypatch.setattr(data.prepare.encode, "_BATCH_CHARACTERS", 1000)


@pytest.fixture
def expected(config, tmp_path):
    """The result of an uninterrupted run."""
    prepare(config(out_dir=str(tmp_path / "undisturbed"), shard_tokens=1000))
    return contents(tmp_path / "undisturbed")


def run_until_call(config, n):
    """Prepare in a process that is killed at its n-th call that changes the disk; False if it finished before."""
    child = os.fork()
    if child == 0:
        calls = iter(range(n))

        def killing(function):
            def call(*args, **kwargs):
                if next(calls, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        for name in ("replace", "rename", "fsync"):
            setattr(os, name, killing(getattr(os, name)))
        with contextlib.suppress(BaseException):
            prepare(config)
            os._exit(0)
        os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.usefixtures("saves_often")
@pytest.mark.slow
def test_killed_at_every_rename_and_every_fsync(config, expected, memory, monkeypatch):
    monkeypatch.setattr(data.prepare.encode, "_BATCH_CHARACTERS", 4000)
    settings = config(shard_tokens=1000, out_dir=str(memory / "out"))
    n = 0
    while run_until_call(settings, n):
        prepare(settings)
        assert contents(memory / "out") == expected, f"killed before call {n}"
        shutil.rmtree(memory / "out")
        n += 1
    assert n > 50


BROKEN = OSError(errno.EIO, "broken")


def stop_in_the_middle(config, monkeypatch, error=BROKEN, spans=3):
    """A run that is interrupted after some spans."""
    write, calls = data.prepare.spans._write_span, iter(range(spans))

    def writing(*args):
        if next(calls, None) is None:
            raise error
        return write(*args)

    monkeypatch.setattr(data.prepare.spans, "_write_span", writing)
    with pytest.raises(type(error)):
        prepare(config)
    monkeypatch.setattr(data.prepare.spans, "_write_span", write)


@pytest.mark.usefixtures("saves_often")
@pytest.mark.parametrize(("error", "workers"), [(BROKEN, 2), (KeyboardInterrupt(), 1), (MemoryError(), 1)], ids=repr)
def test_whatever_stops_it_what_is_written_is_kept(config, expected, tmp_path, monkeypatch, capsys, error, workers):
    settings = config(shard_tokens=1000, workers=workers)
    stop_in_the_middle(settings, monkeypatch, error)
    assert n_spans(tmp_path / "out") == 3
    prepare(settings)
    assert "continuing " in capsys.readouterr().out
    assert contents(tmp_path / "out") == expected


@pytest.fixture
def sources(tmp_path):
    """Every kind of source, including unreadable input, to restart from."""
    (tmp_path / "notes").mkdir()
    for i in range(30):
        (tmp_path / "notes" / f"{i:02}.txt").write_bytes(b"\xff" if i % 7 == 3 else b"Text %d.\n\n" % i * 40)
    book = "".join(f"Paragraph {i}. {'word ' * 50}\n\n" for i in range(2000))
    (tmp_path / "notes" / "book.txt").write_text(book)
    lines = b"".join(b'{"text": "line %d of a damaged archive"}\n' % i for i in range(3000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-2000])
    (tmp_path / "b.jsonl").write_bytes(b"")
    (tmp_path / "c.jsonl").write_bytes(lines[:20_000].replace(b"line 1", b"line"))
    (tmp_path / "hub").mkdir()
    for i in range(3):
        table = pyarrow.table({"body": [f"row {row} of file {i}" for row in range(500)]})
        parquet.write_table(table, tmp_path / "hub" / f"train-{i}.parquet", row_group_size=100)
    return {
        "text": {"name": "text", "path": str(tmp_path / "notes" / "*.txt")},
        "jsonl": {"name": "jsonl", "path": str(tmp_path / "*.jsonl*")},
        "hf": {"name": "hf", "path": str(tmp_path / "hub"), "text_field": "body"},
    }


@pytest.mark.usefixtures("saves_often")
@pytest.mark.parametrize("name", ["jsonl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("text", "hf"))])
def test_every_source_goes_on(config, sources, memory, monkeypatch, name):
    settings = {"data": sources[name], "shard_tokens": 3000}
    whole = prepare(config(**settings, out_dir=str(memory / "undisturbed")))
    assert name == "hf" or len(whole.skipped) > 0
    for _ in range(3):
        stop_in_the_middle(config(**settings, out_dir=str(memory / "out")), monkeypatch, spans=2)
    prepare(config(**settings, out_dir=str(memory / "out")))
    assert contents(memory / "out") == contents(memory / "undisturbed")


@pytest.mark.usefixtures("saves_often")
@pytest.mark.parametrize(("file", "change"), [(SPAN, "other"), ("train.bin", "missing"), ("val.idx", "other")])
def test_a_damaged_span_is_named(config, tmp_path, monkeypatch, file, change):
    stop_in_the_middle(config(shard_tokens=1000), monkeypatch)
    damage(tmp_path / "out.partial" / "span-00001" / file, change)
    if (file, change) == (SPAN, "missing"):  # it is written again
        prepare(config(shard_tokens=1000))
        assert verify(tmp_path / "out") == []
        return
    if file != SPAN and change == "other":  # verify_dataset.py finds it
        prepare(config(shard_tokens=1000))
        (problem,) = verify(tmp_path / "out")
        assert f"{file.replace('.', '-00001.')} is damaged: its sha256 is" in problem
        return
    with pytest.raises((UserError, OSError), match=r"out\.partial") as error:
        prepare(config(shard_tokens=1000))
    assert "\n" not in str(error.value)
    shutil.rmtree(tmp_path / "out.partial")
    prepare(config(shard_tokens=1000))


def damage(path, change):
    if change == "missing":
        path.unlink()
    elif change == "cut":
        os.truncate(path, 5)
    else:
        path.write_bytes(b"{" * path.stat().st_size)


@pytest.mark.usefixtures("saves_often")
def test_stopped_while_finishing_the_input_is_not_read_again(config, expected, tmp_path, monkeypatch):
    replace = os.replace

    def stopping(source, target):
        if Path(target).name == "val-00002.idx":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        prepare(config(shard_tokens=1000))
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(data.prepare.dataset, "encode_all", None)
    prepare(config(shard_tokens=1000))
    assert contents(tmp_path / "out") == expected


def test_two_processes_do_not_write_the_same_dataset(config, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    handle = os.open(partial / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(UserError, match=r"out\.partial is being written by another process"):
        prepare(config())
    os.close(handle)
    prepare(config())
