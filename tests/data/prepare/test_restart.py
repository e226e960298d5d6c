"""A killed run resumes when it is started again, and makes the same bytes as an uninterrupted one."""

import contextlib
import errno
import fcntl
import gzip
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
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
from data.prepare.spans import PLAN, SPAN
from data.prepare.verify import verify
from data.shards import read_manifest

ROOT = Path(__file__).resolve().parents[3]
DRIVER = """
import runpy, sys
import data.prepare.encode
data.prepare.encode._BATCH_CHARACTERS = 20_000
sys.argv[0] = "scripts/prepare_data.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""

INTERRUPTED = """
import os, signal
rename = os.rename
def interrupting(source, target):
    rename(source, target)
    os.killpg(0, signal.SIGINT)  # as the terminal does
os.rename = interrupting  # of the first span
"""


@pytest.fixture
def large(tmp_path):
    """40,000 short documents in three files, some unreadable."""
    rng = random.Random(0)
    texts = [f"{i} " + "word " * rng.randrange(40) for i in range(40_000)]
    lines = [json.dumps({"text": text, "meta": {"pile_set_name": f"set {i % 5}"}}) for i, text in enumerate(texts)]
    lines += ["{", '{"text": ""}', '{"text": 3}'] * 5
    rng.shuffle(lines)
    for part in range(3):
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines[part::3]) + "\n")
    path = f"data.path='{tmp_path / '*.jsonl'}'"
    return ["data=jsonl", path, "tokenizer=bytes", "val_fraction=0.1", "shard_tokens=100_000"]


def start(options, out_dir, workers, before=""):
    return subprocess.Popen(
        [sys.executable, "-c", before + DRIVER, *options, f"out_dir={out_dir}", f"workers={workers}"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    printed, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    return printed


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
    (tmp_path / "rows.json").write_bytes(lines[: lines.index(b"\n", 50_000)])
    (tmp_path / "hub").mkdir()
    for i in range(3):
        table = pyarrow.table({"body": [f"row {row} of file {i}" for row in range(500)]})
        parquet.write_table(table, tmp_path / "hub" / f"train-{i}.parquet", row_group_size=100)
    return {
        "text": {"name": "text", "path": str(tmp_path / "notes" / "*.txt")},
        "jsonl": {"name": "jsonl", "path": str(tmp_path / "*.jsonl*")},
        "pile": {"name": "pile", "path": "json", "data_files": str(tmp_path / "rows.json")},
        "hf": {"name": "hf", "path": str(tmp_path / "hub"), "text_field": "body"},
    }


@pytest.mark.usefixtures("saves_often")
@pytest.mark.parametrize(
    "name", ["jsonl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("text", "pile", "hf"))]
)
def test_every_source_goes_on(config, sources, memory, monkeypatch, name):
    settings = {"data": sources[name], "shard_tokens": 3000}
    whole = prepare(config(**settings, out_dir=str(memory / "undisturbed")))
    assert name in ("pile", "hf") or len(whole.skipped) > 0
    for _ in range(3):
        stop_in_the_middle(config(**settings, out_dir=str(memory / "out")), monkeypatch, spans=2)
    prepare(config(**settings, out_dir=str(memory / "out")))
    assert contents(memory / "out") == contents(memory / "undisturbed")


@pytest.mark.usefixtures("saves_often")
def test_restarts_of_something_else_are_refused(config, corpus, tmp_path, monkeypatch, rank_file):
    usual = {"data": {"name": "jsonl", "path": str(tmp_path / "*.jsonl")}, "shard_tokens": 1000}

    def refused(message, **changes):
        with pytest.raises(
            UserError, match=rf"was started with {message}: use the same again, or delete it to start over"
        ):
            prepare(config(**usual | changes))

    stop_in_the_middle(config(**usual), monkeypatch)
    before, content = bytes_below(tmp_path / "out.partial"), corpus.read_bytes()
    refused(r"val_fraction=0\.1 \(now 0\.3\)", val_fraction=0.3)
    refused(r"shard_tokens=1000 \(now 2000\)", shard_tokens=2000)
    other = {"name": "gpt2", "path": str(rank_file)}
    refused(r".*sha256 of the tokenizer's ranks='\w+' \(now '\w+'\).*", tokenizer=other)
    corpus.write_bytes(content + b"{}\n")
    refused(r"input\..*corpus\.jsonl=\d+ \(now \d+\)")
    corpus.rename(tmp_path / "another.jsonl")
    refused(r"input\..*another\.jsonl=None \(now \d+\), input\..*corpus\.jsonl=\d+ \(now None\)")
    (tmp_path / "another.jsonl").rename(corpus)
    corpus.write_bytes(content)
    assert bytes_below(tmp_path / "out.partial") == before
    prepare(config(**usual, on_error="stop"))


def bytes_below(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("saves_often")
@pytest.mark.parametrize("file", [SPAN, "train.bin", "val.idx"])
@pytest.mark.parametrize("change", ["missing", "cut", "other"])
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


@pytest.mark.usefixtures("saves_often")
def test_a_span_that_is_missing_is_written_again(config, expected, tmp_path, monkeypatch):
    stop_in_the_middle(config(shard_tokens=1000), monkeypatch)
    shutil.rmtree(tmp_path / "out.partial" / "span-00001")
    prepare(config(shard_tokens=1000))
    assert contents(tmp_path / "out") == expected


@pytest.mark.usefixtures("saves_often")
@pytest.mark.parametrize("change", ["cut", "other"])
def test_a_damaged_plan_is_named_and_a_damaged_tokenizer_replaced(config, expected, tmp_path, monkeypatch, change):
    stop_in_the_middle(config(shard_tokens=1000), monkeypatch)
    plan = (tmp_path / "out.partial" / PLAN).read_bytes()
    damage(tmp_path / "out.partial" / PLAN, change)
    with pytest.raises(UserError, match=rf"out\.partial.*{PLAN}"):
        prepare(config(shard_tokens=1000))
    (tmp_path / "out.partial" / PLAN).write_bytes(plan)
    damage(tmp_path / "out.partial" / "tokenizer.json", change)
    prepare(config(shard_tokens=1000))
    assert contents(tmp_path / "out") == expected


@pytest.mark.usefixtures("saves_often")
def test_spans_without_a_plan_are_not_used(config, tmp_path, monkeypatch):
    stop_in_the_middle(config(shard_tokens=1000), monkeypatch)
    (tmp_path / "out.partial" / PLAN).unlink()
    prepare(config(shard_tokens=700, tokenizer={"name": "bytes"}))
    assert len(read_manifest(tmp_path / "out").splits["train"].shards) > 3
    assert verify(tmp_path / "out") == []


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


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.slow
def test_ctrl_c_is_one_line_and_the_same_command_goes_on(large, memory, workers):
    out = memory / "out"
    process = start(large, out, workers, before=INTERRUPTED)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "error: interrupted; the same command continues from what is written\n")
    assert n_spans(out) > 0
    assert "continuing " in finish(start(large, out, workers))


def test_two_processes_do_not_write_the_same_dataset(config, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    handle = os.open(partial / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(UserError, match=r"out\.partial is being written by another process"):
        prepare(config())
    os.close(handle)
    prepare(config())


@pytest.mark.usefixtures("saves_often")
@pytest.mark.parametrize("limit", [300, 1500, 3000])
def test_files_that_may_not_grow_are_one_line_too(config, expected, tmp_path, limit):
    settings = config(shard_tokens=1000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(UserError, match=r"out\.partial cannot be written"):
            prepare(settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    prepare(settings)
    assert contents(tmp_path / "out") == expected
