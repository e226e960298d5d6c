"""A killed run resumes when it is started again, and makes the same bytes as an uninterrupted one."""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
from pathlib import Path

import pytest
from test_prepare import contents

import data.prepare.dataset
import data.prepare.encode
from common.settings import UserError
from data.prepare.dataset import prepare_dataset
from data.prepare.spans import SPAN
from data.prepare.verify import verify_dataset


@pytest.fixture
def saves_often(monkeypatch):
    """Small batches; spans are small by shard_tokens."""
    monkeypatch.setattr(data.prepare.encode, "_BATCH_CHARACTERS", 1000)


@pytest.fixture
def expected(config, tmp_path):
    """The result of an uninterrupted run."""
    prepare_dataset(config(out_dir=str(tmp_path / "undisturbed"), shard_tokens=1000))
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
            prepare_dataset(config)
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
        prepare_dataset(settings)
        assert contents(memory / "out") == expected, f"killed before call {n}"
        shutil.rmtree(memory / "out")
        n += 1
    assert n > 50


BROKEN = OSError(errno.EIO, "broken")


def stop_in_the_middle(config, monkeypatch, error=BROKEN):
    """A run that is interrupted after three spans."""
    calls = iter(range(3))
    rename = os.rename

    def stopping(source, target):
        if next(calls, None) is None:
            raise error
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", stopping)
        with pytest.raises(type(error)):
            prepare_dataset(config)


@pytest.mark.usefixtures("saves_often")
@pytest.mark.parametrize(("error", "workers"), [(BROKEN, 2), (KeyboardInterrupt(), 1)], ids=repr)
def test_whatever_stops_it_what_is_written_is_kept(config, expected, tmp_path, monkeypatch, capsys, error, workers):
    settings = config(shard_tokens=1000, workers=workers)
    stop_in_the_middle(settings, monkeypatch, error)
    assert len([*tmp_path.glob("out.partial/span-?????")]) == 3
    prepare_dataset(settings)
    assert "continuing " in capsys.readouterr().out
    assert contents(tmp_path / "out") == expected


@pytest.mark.usefixtures("saves_often")
@pytest.mark.parametrize("file", [SPAN, "train.bin", "val.idx"])
def test_a_damaged_span_is_named(config, tmp_path, monkeypatch, file):
    stop_in_the_middle(config(shard_tokens=1000), monkeypatch)
    path = tmp_path / "out.partial" / "span-00001" / file
    if file == "train.bin":
        path.unlink()
    else:
        path.write_bytes(b"{" * path.stat().st_size)
    if file == "val.idx":  # verify_dataset.py finds it
        prepare_dataset(config(shard_tokens=1000))
        (problem,) = verify_dataset(tmp_path / "out")
        assert "val-00001.idx is damaged: its sha256 is" in problem
        return
    with pytest.raises(UserError, match=r"out\.partial is damaged: delete it"):
        prepare_dataset(config(shard_tokens=1000))


@pytest.mark.usefixtures("saves_often")
def test_stopped_while_finishing_the_input_is_not_read_again(config, expected, tmp_path, monkeypatch):
    replace = os.replace

    def stopping(source, target):
        if Path(target).name == "val-00002.idx":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stopping)
        with pytest.raises(KeyboardInterrupt):
            prepare_dataset(config(shard_tokens=1000))
    monkeypatch.setattr(data.prepare.dataset, "encode_all", None)
    prepare_dataset(config(shard_tokens=1000))
    assert contents(tmp_path / "out") == expected


def test_two_processes_do_not_write_the_same_dataset(config, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    with open(partial / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"out\.partial is being written by another process"):
            prepare_dataset(config())
    prepare_dataset(config())
