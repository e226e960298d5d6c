"""metrics.jsonl, on disks that fail too, and a tracker that may fail in any way."""

import contextlib
import errno
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
import types

import pytest

from common.settings import UserError
from trainer import metrics
from trainer.loop import fit
from trainer.metrics import MetricsLog
from trainer.trackers import WandbConfig, WandbTracker

pytestmark = pytest.mark.usefixtures("restored_torch")

WANDB = {"tracker": {"wandb": {"every": 1, "finish_seconds": 60.0}}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def opened(path):
    """Opens the log at `path`, and closes it at the end."""
    logs = []

    def open_log(resumed_at=0):
        logs.append(MetricsLog(path, resumed_at))
        return logs[-1]

    yield open_log
    for log in logs:
        log.close()


def train(step):
    return {"step": step, "tokens": 64 * step, "loss": 3 / step}


def read_metrics(path):
    return list(metrics.read_metrics(path))


def steps(path):
    return [line["step"] for line in read_metrics(path)]


def test_a_log_drops_the_lines_after_the_step_it_resumes_from(path, opened):
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 0.1}\n{"step": 2, "val_loss": 3}\n{"step": 3}\n{"st')
    log = opened(resumed_at=2)
    log.write({"step": 3, "loss": 1e-300})
    assert read_metrics(path) == [  # while it is open
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": 0.1},
        {"step": 2, "val_loss": 3},
        {"step": 3, "loss": 1e-300},
    ]
    log.sync()


def test_a_log_that_is_missing_when_a_run_goes_on_is_said(path, opened, capsys):
    opened(resumed_at=0)
    path.unlink()
    assert capsys.readouterr().err == ""
    opened(resumed_at=2)
    assert capsys.readouterr().err == f"warning: {path} is missing: the numbers of steps 1 to 2 are lost\n"


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ("", ""),
        ('{"st', ""),
        ('{"step": 1}\n{"step":2,  "a": 0.10}\n{"step": 3}\n', '{"step": 1}\n{"step":2,  "a": 0.10}\n'),
        ('{"step": 1}\n{"step": 9, "event": "rolled_back"}\n{"step": 2}\n{"step": 3}\n', '{"step": 1}\n{"step": 2}\n'),
        ('{"step": 1}\n\n{"step": 2}\n{"step', '{"step": 1}\n{"step": 2}\n'),
    ],
    ids=["empty", "a part of a line", "in order", "an event in between", "an empty line"],
)
def test_what_a_log_keeps_it_keeps_byte_for_byte(path, opened, before, kept):
    path.write_text(before)
    opened(resumed_at=2)
    assert path.read_text() == kept


def test_a_log_refuses_what_is_not_json(path, opened):
    log = opened()
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.write({"step": 1, "loss": float("nan")})
    assert path.read_text() == ""
    log.write(train(1))
    assert steps(path) == [1]


@pytest.mark.parametrize(
    "damage",
    [b"\x00\xff", b"{", b"[]", b"3", b'"step"', b"{}", b'{"step": "2"}', b'{"step": true}', b"[" * 100_000],
    ids=lambda damage: repr(damage[:20]),
)
def test_a_damaged_line_in_the_middle_is_named(path, damage):
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 2}\n')
    for read in (read_metrics, lambda path: MetricsLog(path, resumed_at=5)):
        with pytest.raises(UserError, match=r"metrics\.jsonl is damaged in line 2 .*: fix or delete that line"):
            read(path)


class Disk:
    """A file that may grow by at most `room` bytes, which may be 0."""

    def __init__(self, path):
        self.before, self.path = resource.getrlimit(resource.RLIMIT_FSIZE), path

    def leave(self, room):
        size = self.path.stat().st_size if self.path.exists() else 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, self.before[1]))

    def make_space(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


class SmallDisk:
    """A small disk that another file fills completely; free space comes in whole blocks."""

    def __init__(self, folder):
        self.filler = folder / "filler"

    def leave(self, room):
        with open(self.filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def make_space(self):
        self.filler.unlink()


@pytest.fixture(params=["limit", "tmpfs"])
def disk(request, path):
    """Two kinds of a full disk; only one if the user may not mount a disk."""
    if request.param == "limit":
        disk = Disk(path)
        yield disk
        disk.make_space()
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(path.parent)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        yield SmallDisk(path.parent)
    finally:
        subprocess.run(["umount", "--lazy", str(path.parent)], check=True)  # lazy: a failed test has it open


def written_until_full(log, path, first=1):
    """Writes lines until one does not reach the file; returns its step."""
    for step in range(first, first + 1000):
        log.write(train(step))
        if steps(path)[-1:] != [step]:
            return step
    raise AssertionError("the disk is not full")


def test_a_long_log_is_cut_in_a_time_that_its_length_explains(path):
    """A run of 100,000 steps resumes in a second or so: to copy what is kept for each line would take minutes."""
    path.write_bytes(b"".join(b'{"step": %d, "tokens": 1, "padding": "%s"}\n' % (i, b"x" * 80) for i in range(100_000)))
    started = time.process_time()
    MetricsLog(path, resumed_at=99_000).close()
    assert time.process_time() - started < 20
    assert steps(path)[-1] == 99_000


@pytest.mark.parametrize("room", [0, 1, 70, 1000])
def test_a_full_disk_costs_no_line(disk, path, opened, capsys, room):
    """The file has whole lines at any time, in order; each time without room costs one warning."""
    log = opened()
    log.write(train(1))
    log.sync()
    step = 1
    for _ in range(2):
        disk.leave(room)
        step = written_until_full(log, path, first=step + 1)
        full = path.read_bytes()
        assert full.endswith(b"\n")
        for _ in range(20):
            step += 1
            log.write(train(step))
        assert path.read_bytes() == full
        err = capsys.readouterr().err
        assert err.count("warning:") == 1
        assert "metrics.jsonl': lines wait in memory until they can be written" in err
        for _ in range(2):
            with pytest.raises(OSError, match=r"(No space left|too large).*metrics\.jsonl"):
                log.sync()
        disk.make_space()
        step += 1
        log.write(train(step))
        assert steps(path) == list(range(1, step + 1))
        log.sync()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("way", ["sync", "close"])
def test_lines_that_wait_are_written_by_whatever_comes_next(disk, path, way):
    log = MetricsLog(path, resumed_at=0)
    log.write(train(1))
    disk.leave(0)
    last = written_until_full(log, path, first=2)
    disk.make_space()
    getattr(log, way)()
    assert steps(path) == list(range(1, last + 1))
    if way != "close":
        log.close()


def test_a_full_disk_at_the_end_is_an_error(disk, path):
    log = MetricsLog(path, resumed_at=0)
    log.write(train(1))
    disk.leave(0)
    last = written_until_full(log, path, first=2)
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        log.close()
    assert steps(path) == list(range(1, last))


def test_a_full_disk_does_not_keep_a_run_from_going_back(disk, path):
    """The file is truncated, not copied."""
    log = MetricsLog(path, resumed_at=0)
    log.write(train(1))
    disk.leave(500)
    last = written_until_full(log, path, first=2)
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        log.close()
    log = MetricsLog(path, resumed_at=2)
    log.write(train(3))
    log.close()
    assert steps(path) == [1, 2, 3]
    assert last > 4


def test_a_disk_that_loses_lines_when_it_is_synced_gets_them_again(path, opened, monkeypatch):
    """Disks with quotas and network disks may accept a line, and report only later that they could not store it."""
    log = opened()
    log.write(train(1))
    log.sync()
    for step in (2, 3):
        log.write(train(step))

    def losing(file):
        os.ftruncate(file, len(json.dumps(train(1))) + 1)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", losing)
        for _ in range(2):
            with pytest.raises(OSError, match=r"metrics\.jsonl"):
                log.sync()
    log.write(train(4))
    log.sync()
    assert steps(path) == [1, 2, 3, 4]


def test_a_line_does_not_wait_for_a_sync_in_another_thread(path, opened, monkeypatch):
    log, in_sync, go_on = opened(), threading.Event(), threading.Event()
    log.write(train(1))

    def slow(file):
        in_sync.set()
        go_on.wait(60)

    monkeypatch.setattr(os, "fsync", slow)
    thread = threading.Thread(target=log.sync)
    thread.start()
    assert in_sync.wait(60)
    log.write(train(2))
    assert steps(path) == [1, 2]
    disk = Disk(path)
    disk.leave(0)
    log.write(train(3))  # it waits, and the sync is not about it
    disk.make_space()
    assert thread.is_alive()
    go_on.set()
    thread.join(60)
    log.write(train(4))
    log.sync()
    assert steps(path) == [1, 2, 3, 4]


def test_syncs_of_another_thread_lose_no_line(path, opened):
    log, ended = opened(), threading.Event()

    def sync():
        while not ended.is_set():
            log.sync()

    thread = threading.Thread(target=sync)
    thread.start()
    for step in range(1, 2001):
        log.write(train(step))
    ended.set()
    thread.join(60)
    assert steps(path) == list(range(1, 2001))


OFFLINE = ["tracker.wandb.mode=offline", "tracker.wandb.every=1"]

FAKE = """
import json, os, time
print("noise")

def act(what, *given):
    with open(os.environ["FAKE_WANDB"], "a") as file:
        file.write(json.dumps([what, *given]) + "\\n")
    if os.environ.get("FAKE_FAIL") == what:
        raise ConnectionError(f"no {what} today\\n  (nor tomorrow)")
    if os.environ.get("FAKE_EXIT") == what:
        os._exit(3)
    while os.environ.get("FAKE_HANG") == what:
        time.sleep(1)

act("import")

class Run:
    url = None

    def define_metric(self, name, step_metric=None):
        act("define_metric")

    def log(self, line):
        act("log", line)

    def finish(self, exit_code):
        act("finish", exit_code)

def init(**settings):
    act("init", settings)
    return Run()
"""


class Fake:
    """A wandb whose calls come into a file."""

    def __init__(self, path):
        self.path = path

    def calls(self, name):
        """What the calls of `name` were given."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [given for what, *given in map(json.loads, lines) if what == name]

    @property
    def lines(self):
        return [line for (line,) in self.calls("log")]


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """Puts a fake wandb in place of the real one; hang="init", exit=... or fail=... say what goes wrong where."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("FAKE_WANDB", str(folder / "calls.jsonl"))

    def install(**behaviour):
        for what, where in behaviour.items():
            monkeypatch.setenv(f"FAKE_{what.upper()}", where)
        return Fake(folder / "calls.jsonl")

    return install


def test_wandb_gets_the_lines_of_metrics_jsonl_under_one_id(tiny, wandb):
    fake = wandb()
    fit(tiny(WANDB | {"stop_at": 4}))
    fit(tiny(WANDB))
    assert fake.lines == read_metrics(tiny().run_dir / "metrics.jsonl")
    assert fake.calls("finish") == [[0], [0]]
    (first,), (second,) = fake.calls("init")
    assert first["id"] == second["id"]
    assert first["resume"] == "allow"
    assert (first["project"], first["name"], first["mode"]) == ("log-gpt", "run", "online")
    assert first["dir"] == str(tiny().run_dir)
    assert first["config"] == tiny(WANDB | {"stop_at": 4}).model_dump(mode="json")


@pytest.mark.parametrize(
    "behaviour",
    [
        *({"fail": what} for what in ("import", "init", "define_metric", "log", "finish")),
        *({"hang": what} for what in ("import", "init", "log", "finish")),
        *({"exit": what} for what in ("import", "log", "finish")),
    ],
    ids=lambda behaviour: "-".join(*behaviour.items()),
)
@pytest.mark.slow
def test_training_goes_on_whatever_wandb_does(tiny, wandb, capfd, behaviour):
    wandb(**behaviour)
    seconds = 0.5 if "hang" in behaviour else 60.0
    thread = threading.Thread(target=fit, args=(tiny(WANDB | {"tracker.wandb.finish_seconds": seconds}),), daemon=True)
    thread.start()
    thread.join(50)
    assert not thread.is_alive(), "training hangs"
    lines = [line["step"] for line in read_metrics(tiny().run_dir / "metrics.jsonl") if "loss" in line]
    assert lines == [1, 2, 3, 4, 5, 6]
    out, err = capfd.readouterr()
    assert "noise" not in out + err
    assert err.count("warning:") == err.count("wandb failed") == 1
    (what, where), *_ = behaviour.items()
    problem = {
        "fail": f"(ConnectionError: no {where} today (nor tomorrow))",
        "hang": "did not finish within 0.5 seconds",
        "exit": "its process ended with status 3",
    }
    assert problem[what] in err


def test_wandb_that_is_not_installed_is_one_warning(tiny, tmp_path, monkeypatch, capfd):
    (tmp_path / "wandb.py").write_text("raise ModuleNotFoundError(\"No module named 'wandb'\")")
    monkeypatch.syspath_prepend(str(tmp_path))
    fit(tiny(WANDB))
    err = capfd.readouterr().err
    assert err.count("wandb failed (ModuleNotFoundError: No module named 'wandb')") == err.count("warning") == 1


def test_wandb_that_does_not_keep_up_loses_lines_and_not_time(wandb, capsys):
    fake = wandb(hang="init")
    tracker = WandbTracker({}, finish_seconds=0.1)
    for step in range(100_000):  # more than the pipe takes
        tracker.log({"step": step})
    tracker.finish()
    assert capsys.readouterr().err.count("does not keep up") == 1
    assert fake.lines == []


def test_settings_larger_than_the_pipe_are_not_sent_in_part(wandb, capsys):
    fake = wandb(hang="init")
    WandbTracker({"names": ["Pile-CC"] * 1_000_000}, finish_seconds=0.1).finish()
    assert capsys.readouterr().err.count("does not keep up") == 1
    assert fake.lines == []


def test_an_error_that_ends_training_still_finishes_wandb(tiny, wandb, monkeypatch):
    fake = wandb()
    monkeypatch.setattr("trainer.run.Run.save", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(tiny(WANDB))
    assert (len(fake.lines), fake.calls("finish")) == (2, [[0]])


def test_training_imports_no_wandb(tiny, wandb, monkeypatch):
    fake = wandb()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    fit(tiny())
    assert fake.calls("import") == []
    fit(tiny({"run_dir": str(tiny().run_dir.with_name("other")), **WANDB}))
    assert fake.calls("import") == [[]]  # in its process
    assert "wandb" not in sys.modules


class FakeWriter:
    """In place of torch's SummaryWriter."""

    made = ()
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __init__(self, folder, purge_step):
        FakeWriter.made += (self,)
        self.folder, self.purge_step, self.scalars, self.closed = folder, purge_step, [], False

    def add_scalar(self, key, value, step):
        if key == "lr" and step == 5:
            raise self.error
        self.scalars.append((step, key, value))

    def close(self):
        self.closed = True


@pytest.fixture
def writers(monkeypatch):
    """Puts a fake TensorBoard in place of the real one, and returns a function that gives the writers so far."""
    monkeypatch.setattr(FakeWriter, "made", ())
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return lambda: FakeWriter.made


def test_trackers_at_once_each_get_some_lines_and_metrics_jsonl_has_every_step(tiny, wandb, writers, capsys):
    fake = wandb()
    both = {"tracker": {"wandb": {"every": 3}, "tensorboard": {"every": 2}}}
    fit(tiny(both | {"stop_at": 4}))
    lines = read_metrics(tiny().run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4]
    assert fake.lines == lines[2:4]
    (writer,) = writers()
    figures = [line for line in lines if line["step"] in (2, 4) or "val_loss" in line]
    expected = [(line["step"], k, v) for line in figures for k, v in line.items() if k != "step" and v is not None]
    assert writer.scalars == expected
    assert (writer.folder, writer.purge_step, writer.closed) == (str(tiny().run_dir / "tensorboard"), 1, True)
    fit(tiny(both))
    assert writers()[1].purge_step == 5
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [FakeWriter.error, RuntimeError("its thread\nhas ended")])
def test_an_error_of_tensorboard_is_one_warning(tiny, writers, capsys, monkeypatch, error):
    monkeypatch.setattr(FakeWriter, "error", error)
    fit(tiny({"tracker": {"tensorboard": {"every": 1}}}))
    assert capsys.readouterr().err.count("tensorboard failed") == 1
    assert max(step for step, *_ in writers()[0].scalars) == 5
    assert steps(tiny().run_dir / "metrics.jsonl") == [1, 2, 3, 3, 4, 5, 6, 6]


def test_tensorboard_that_is_not_installed_is_one_line(command, tiny_args, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    real = importlib.import_module

    def without(name, package=None):
        if name == "tensorboard":
            raise ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard")
        return real(name, package)

    monkeypatch.setattr("importlib.import_module", without)
    result = command("train", *tiny_args, "tracker=[local,tensorboard]")
    assert result.err == "error: tensorboard is not installed: pip install -e '.[tensorboard]'\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_real_tensorboard(tiny):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit(tiny({"tracker": {"tensorboard": {"every": 1}}}))
    events = EventAccumulator(str(tiny().run_dir / "tensorboard")).Reload()
    stored = {(key, event.step): event.value for key in events.Tags()["scalars"] for event in events.Scalars(key)}
    for line in read_metrics(tiny().run_dir / "metrics.jsonl"):
        for key in line.keys() & {"loss", "val_loss", "lr"}:
            assert stored[key, line["step"]] == pytest.approx(line[key], rel=1e-6)  # it stores float32


def test_wandb_settings_of_a_run_can_be_named(tmp_path, wandb):
    fake = wandb()
    config = WandbConfig(mode="offline", project="p", run_name="n")
    config.open("abc", tmp_path, {"x": 1}).finish()
    ((settings,),) = fake.calls("init")
    assert settings == {
        "id": "abc",
        "resume": "allow",
        "mode": "offline",
        "project": "p",
        "name": "n",
        "dir": str(tmp_path),
        "config": {"x": 1},
        "settings": {"program": sys.argv[0], "x_stats_pid": os.getpid()},
    }


@pytest.mark.slow
def test_the_real_wandb_offline(run_process, tiny_args, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    (result,) = run_process(["train.py", *tiny_args, "tracker=wandb", *OFFLINE])
    assert result.status == 0, result.err
    assert "wandb failed" not in result.err
    (stored,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    content = stored.read_bytes()
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert repr(line.get("loss", line.get("val_loss"))).encode() in content, line
    assert steps(tmp_path / "run" / "metrics.jsonl") == [1, 2, 3, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("tail", [b"\0\0\0\n", b"\xff\xfe{\n", b"[]\n{}\n", b"\0" * 5000])
def test_what_a_power_cut_leaves_after_the_last_save_is_dropped(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 1, "tokens": 2}\n{"step": 2, "tokens": 4}\n'
    path.write_bytes(whole + b'{"step": 3, "tokens": 6}\n' + tail)
    MetricsLog(path, resumed_at=2).close()
    assert path.read_bytes() == whole
    path.write_bytes(tail.rstrip(b"\n") + b"\n" + whole)
    with pytest.raises(UserError, match="is damaged in line 1"):
        MetricsLog(path, resumed_at=2)
