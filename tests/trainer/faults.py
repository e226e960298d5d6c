"""Training in processes that are killed at chosen operations.

A life of a run trains by `trainer.loop.fit`, in forks (ranks.py), so that a start costs a tenth of a second. It ends on
its own, or by SIGKILL of itself before its n-th fsync or rename.

What a kill before any of these leaves is recorded in one life (`record`), since a killed process leaves what the
operations before the kill made.
"""

import contextlib
import errno
import faulthandler
import functools
import hashlib
import json
import os
import resource
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from typing import NamedTuple

import ranks
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from common.settings import UserError, decode
from runtime.checkpoint import checkpoint_path
from trainer.config import TrainConfig
from trainer.loop import fit

SECONDS_TO_FINISH = 120  # a life that takes longer hangs
SECONDS_BEHIND_A_KILLED_ONE = 0.05  # how long the other processes of a run live on, before they are killed too


class Kill(NamedTuple):
    """SIGKILL before an fsync or a rename, counted from 1, of the main thread or of all others together."""

    thread: str  # "main" or "other"
    number: int


class Operation(NamedTuple):
    """An fsync or a rename: its thread, its name, and the path that it syncs or makes."""

    thread: str
    name: str
    path: str


class Life(NamedTuple):
    """How the processes of a life ended: their exit statuses by rank (-9: killed), and what they printed."""

    statuses: list[int]
    out: str
    err: str
    operations: list[Operation]
    """Of the main process, as they were begun."""

    @property
    def killed(self) -> bool:
        """Whether a SIGKILL came before the end."""
        return -signal.SIGKILL in self.statuses

    @property
    def finished(self) -> bool:
        """Whether all of it ended well."""
        return set(self.statuses) == {0}


def live(config, processes=1, kill=None):
    """Train by `config` until it ends, or until it is killed.

    Args:
        kill: the operation at which the main process kills itself.
    """
    with tempfile.NamedTemporaryFile("r") as trace:
        job = {"config": config.model_dump(mode="json"), "kill": kill}
        arguments = ["-c", "import faults; faults.train()", json.dumps(job | {"trace": trace.name})]
        with ranks.started(processes, *arguments, PATH="") as started:  # no git, which takes longer than other things
            _watch(started)
            statuses, outs, errs = zip(*ranks.finish(*started), strict=True)
        life = Life(list(statuses), "".join(outs), "".join(errs), [Operation(*json.loads(line)) for line in trace])
    assert -signal.SIGABRT not in life.statuses, f"it hangs:\n{life.err}"
    return life


def _watch(processes):
    """Wait for all; kill them some time after one was killed."""
    kills = [(time.monotonic() + SECONDS_TO_FINISH, signal.SIGABRT)]  # it prints where all threads are
    while running := [process for process in processes if process.returncode is None]:
        now = time.monotonic()
        due = [kill for kill in kills if kill[0] <= now]
        kills = [kill for kill in kills if kill[0] > now]
        for _, number in due:
            for process in processes:
                if process.returncode is None:
                    os.kill(process.pid, number)
        for process in running:
            if process.poll() == -signal.SIGKILL:
                kills.append((now + SECONDS_BEHIND_A_KILLED_ONE, signal.SIGKILL))
        time.sleep(0.001)


def finish(config, processes=1):
    """Train by `config` to its end; all must be well."""
    life = live(config, processes)
    assert life.finished, f"{life.statuses}\n{life.err}"
    return life


# Where to kill


def kills(operations):
    """A kill at every operation of the main thread and of the others."""
    for thread in ("main", "other"):
        for number in range(sum(done.thread == thread for done in operations)):
            yield Kill(thread, number + 1)


def names_given(own):
    """The operations of one thread that give a checkpoint its name: their indices, and the checkpoints' steps."""
    ends = [(i, done.path.rpartition("/step-")[2]) for i, done in enumerate(own) if done.name in ("rename", "replace")]
    return [(i, int(step)) for i, step in ends if step.isdigit()]


def last_saved(operations):
    """The step of the last checkpoint whose name was synced when these operations ended; 0: none."""
    threads = [[done for done in operations if done.thread == thread] for thread in ("main", "other")]
    return max([0] + [step for own in threads for i, step in names_given(own) if i + 2 < len(own)])


# What a run leaves behind


def steps_of(run_dir):
    """The steps of a run's checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in run_dir.glob("checkpoints/step-*[0-9]"))


def is_whole(run_dir, step):
    """Whether a checkpoint's files and their sums match its manifest."""
    folder = checkpoint_path(run_dir, step)
    try:
        sums = json.loads((folder / "manifest.json").read_text())["sha256"]
        files = content(folder)
    except (OSError, ValueError):
        return False
    del files["manifest.json"]
    return sums == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def content(folder):
    """All files of a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def metrics(run_dir):
    """The lines of metrics.jsonl without timings."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: v for key, v in line.items() if key not in ("tokens_per_second", "mfu")} for line in lines]


def result(run_dir):
    """Everything that must be equal in two equal runs, by name: every file in checkpoints/, and the metrics."""
    return content(run_dir / "checkpoints") | {"metrics.jsonl": metrics(run_dir)}


def assert_same(run_dir, expected, why=""):
    """The run has exactly these results."""
    found = result(run_dir)
    assert sorted(found) == sorted(expected), why
    differing = [name for name in expected if found[name] != expected[name]]
    assert not differing, f"{why}: {differing}"


# On the disk


class Disk:
    """Counts this process's fsyncs and renames, and knows what is synced."""

    def __init__(self, folder=None):
        self.operations = []
        """As they were begun."""
        self.synced = {}  # (device, inode) -> a handle of the file, so that its number stays its own, and its size
        self._lock = threading.RLock()  # one operation at a time
        for path in folder.rglob("*") if folder is not None else ():
            if path.is_file():  # of an earlier life
                with open(path, "rb") as file:
                    self._is_synced(file.fileno())

    def begun(self, done):
        """Called before an operation."""

    def install(self, patch=setattr):
        """Wrap all three."""
        for name in ("rename", "replace"):
            patch(os, name, self._counted(name, getattr(os, name), lambda source, target, **_: str(target)))
        patch(os, "fsync", self._counted("fsync", os.fsync, _path))

    def _counted(self, name, function, path_of):
        @functools.wraps(function)
        def call(*args, **kwargs):
            with self._lock:
                thread = "main" if threading.current_thread() is threading.main_thread() else "other"
                self.operations.append(Operation(thread, name, path_of(*args, **kwargs)))
                self.begun(self.operations[-1])
                function(*args, **kwargs)
                if name == "fsync":
                    self._is_synced(*args)

        return call

    def _is_synced(self, handle):
        status = os.fstat(handle)
        kept, _ = self.synced.get((status.st_dev, status.st_ino), (None, 0))
        self.synced[status.st_dev, status.st_ino] = os.dup(handle) if kept is None else kept, status.st_size


def _path(handle):
    with contextlib.suppress(OSError):  # a system without /proc
        return os.readlink(f"/proc/self/fd/{handle}")
    return str(handle)


class KillingDisk(Disk):
    """Kills its process before an operation; writes down all of them."""

    def __init__(self, kill, trace):
        super().__init__()
        self._kill = kill
        self._trace = os.open(trace, os.O_WRONLY | os.O_CREAT)
        self._write = os.write

    def begun(self, done):
        """Kill the process if it is the chosen operation."""
        self._write(self._trace, (json.dumps(done) + "\n").encode())
        if self._kill == Kill(done.thread, sum(other.thread == done.thread for other in self.operations)):
            os.kill(os.getpid(), signal.SIGKILL)


class Left(NamedTuple):
    """What a killed process leaves: the content of its run directory."""

    why: str  # the operation at which it was killed, and how
    files: dict  # by name; None for a folder
    saved: int  # the step of the last checkpoint whose name was synced; 0: none


class RecordingDisk(Disk):
    """Records what each possible kill would leave of a run.

    Without a power cut, or with one: then what was not fsynced is lost. Kills that leave the same are recorded once.
    """

    def __init__(self, run_dir):
        super().__init__(run_dir)
        self._run_dir = run_dir
        self._left = {}

    @property
    def left(self):
        """Everything that a kill may leave, in the order of the kills."""
        return list(self._left.values())

    def begun(self, done):
        """Record what there is."""
        if not done.path.startswith(str(self._run_dir)):
            return
        for power in (False, True):
            files = self._files(power)
            key = hashlib.sha256(repr(sorted(files.items())).encode()).digest()
            why = f"{'power cut' if power else 'killed'} before {done}"
            self._left.setdefault(key, Left(why, files, last_saved(self.operations)))

    def _files(self, power):
        files = {}
        for path in sorted(self._run_dir.rglob("*")):
            name = str(path.relative_to(self._run_dir))
            status = path.stat()
            files[name] = None if path.is_dir() else path.read_bytes()
            _, synced = self.synced.get((status.st_dev, status.st_ino), (None, 0))
            if power and files[name] is not None:
                files[name] = files[name][:synced]
        return files


def record(config):
    """Train by `config` to its end in this process. Returns the disk, which knows what kills would leave."""
    import pytest  # not in the processes of a life

    disk = RecordingDisk(config.run_dir)
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch.setattr)
        fit(config)
    for handle, _ in disk.synced.values():
        os.close(handle)
    return disk


def put_back(left, run_dir):
    """Leave a run as a killed process does."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir()
    for name, data in left.files.items():
        if data is None:
            (run_dir / name).mkdir()
        else:
            (run_dir / name).write_bytes(data)


class LimitedFiles:
    """Limits the size of files, like a disk that is full for large files only."""

    error = os.strerror(errno.EFBIG)

    def __init__(self, limit):
        self.limit = limit
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self):
        """Let no file grow beyond the limit."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self._before[1]))

    def close(self):
        """Let files grow again."""
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


# In the processes of a life


def draw(count, *_):
    """Draw random numbers, as a model with dropout does in each step."""
    torch.rand(count)


def train():
    """A process of a life, from its fork to its end."""
    job = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    if os.environ["WORLD_SIZE"] == "1":
        del os.environ["RANK"]  # as started without a launcher
    faulthandler.enable()
    secrets.token_hex = lambda n: "0" * 2 * n  # the run's id; it would be the only difference between two runs
    register_optimizer_step_pre_hook(functools.partial(draw, 1 + rank))
    if rank == 0:
        KillingDisk(job["kill"] and Kill(*job["kill"]), job["trace"]).install()
    status = 1
    try:
        fit(decode(TrainConfig, job["config"]))
        status = 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # whatever `fit` left to be done afterwards is lost
