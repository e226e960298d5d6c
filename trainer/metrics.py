"""Writes a run's numbers to metrics.jsonl, and to wandb if asked for. The only file that imports wandb."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import Field

from common.console import say, warn
from common.files import file_size, sync_directory, write_atomic
from common.settings import Settings, UserError

_PIPE_BYTES = 2**20  # the most that Linux gives to any user


class LocalTrackerConfig(Settings, defaults="tracker/local"):
    """Writes metrics.jsonl and loss.png to the run directory. Needs no account."""

    name: Literal["local"]
    every: int = Field(ge=1)
    """Steps between training lines."""

    def open(self, run_id: str, run_dir: Path, config: dict[str, Any]) -> "Tracker":
        """Start the tracker of a run."""
        return Tracker()


class WandbTrackerConfig(Settings, defaults="tracker/wandb"):
    """Sends the same lines to Weights & Biases too. Training goes on even if that fails."""

    name: Literal["wandb"]
    every: int = Field(ge=1)
    """Steps between training lines."""
    mode: Literal["online", "offline", "disabled"]
    """offline writes under the run directory, for `wandb sync` later."""
    project: str
    """wandb's project."""
    run_name: str | None
    """Name of the run in wandb; null: the name of the run directory."""
    finish_seconds: float = Field(gt=0)
    """Longest time that the end of training waits for the last uploads."""

    def open(self, run_id: str, run_dir: Path, config: dict[str, Any]) -> "Tracker":
        """Start the tracker of a run."""
        settings = {"program": sys.argv[0], "x_stats_pid": os.getpid()}  # this process, not the one that wandb runs in
        about = {"project": self.project, "name": self.run_name or run_dir.name, "dir": str(run_dir), "config": config}
        how = {"id": run_id, "resume": "allow", "mode": self.mode, "settings": settings}
        return WandbTracker(about | how, self.finish_seconds)


TrackerConfig = Annotated[LocalTrackerConfig | WandbTrackerConfig, Field(discriminator="name")]


class Tracker:
    """Receives the lines of metrics.jsonl. The base class ignores them."""

    def log(self, line: dict[str, Any]) -> None:
        """Take a line. Never blocks, never raises."""

    def finish(self) -> None:
        """Send what is left, in bounded time."""


class WandbTracker(Tracker):
    """Runs wandb in a separate process: if wandb hangs, fails or crashes, training continues with a warning.

    In this process, wandb would wrap stdout and stderr, and wait for its service process at exit without a limit. A
    process, with all that it started, can be killed.
    """

    def __init__(self, settings: dict[str, Any], finish_seconds: float) -> None:
        self._finish_seconds = finish_seconds
        self._lost, self._lock = False, threading.Lock()
        self._process = _start_process()
        self._thread = threading.Thread(target=self._read_reports, name="wandb", daemon=True)
        self._thread.start()
        self._send({"settings": settings, "trainer": os.getpid(), "finish_seconds": finish_seconds})

    def log(self, line: dict[str, Any]) -> None:
        """Send a line. If wandb is too far behind, or gone, the line is in metrics.jsonl only."""
        self._send(line)

    def finish(self) -> None:
        """Wait for the last lines, but no longer than finish_seconds. Afterwards, nothing of wandb is running."""
        self._send(None)
        _pipe(self._process.stdin).close()
        self._thread.join(self._finish_seconds)  # its warning too is printed by then
        if self._thread.is_alive():
            self._give_up(f"it did not finish within {self._finish_seconds:g} seconds")

    def _send(self, message: Any) -> None:
        """Write a line of JSON to the pipe, which holds some thousands of them."""
        if not self._lost:
            try:
                os.write(_pipe(self._process.stdin).fileno(), json.dumps(message).encode() + b"\n")
            except BlockingIOError:
                self._give_up("it does not keep up")
            except OSError:
                pass  # the process has ended, and _read_reports says why

    def _read_reports(self) -> None:
        """Print what the process reports, until it ends."""
        with _pipe(self._process.stdout) as reports:
            for text in reports:
                report = json.loads(text)
                if "url" in report:
                    say(f"wandb: {report['url']}")
                else:
                    self._give_up(report["error"])
        if status := self._process.wait():
            self._give_up(f"its process ended with status {status}")

    def _give_up(self, why: str) -> None:
        with self._lock:
            if self._lost:
                return
            self._lost = True
        if self._process.poll() is None:
            _kill_tree(self._process.pid)
        warn(f"wandb failed ({why}); training goes on, and metrics.jsonl has every line")


def _start_process() -> "subprocess.Popen[bytes]":
    """Run this file as a program that ignores the signals that stop training: it ends when its input does."""
    ignored = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)  # a new process inherits the mask
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer.metrics"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pipesize=_PIPE_BYTES,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.set_blocking(_pipe(process.stdin).fileno(), False)
    return process


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _serve() -> None:
    """Run wandb: read lines from WandbTracker on stdin, and write reports to it on stdout."""
    lines, reports = (os.fdopen(os.dup(fd), mode, encoding="utf-8") for fd, mode in ((0, "r"), (1, "w")))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)  # wandb's service process would inherit the pipes and keep them open

    def report(**what: str) -> None:
        print(json.dumps(what), file=reports, flush=True)

    try:
        first = json.loads(lines.readline())
        limit = (first["trainer"], first["finish_seconds"])
        threading.Thread(target=_outlive, args=limit, daemon=True).start()
        import wandb

        run = wandb.init(**first["settings"])
        if url := getattr(run, "url", None):
            report(url=url)
        # A resumed run repeats some steps: with an axis of their own, steps need not increase.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        line: Any = {}
        for text in lines:
            if (line := json.loads(text)) is not None:
                run.log(line)
        run.finish(exit_code=int(line is not None))  # not null: training was killed
    except BaseException as error:  # no failure of wandb is worth a run
        with contextlib.suppress(OSError):
            report(error=" ".join(f"{type(error).__name__}: {error}".split()))
        _kill_tree(os.getpid())  # a normal exit would wait for its service process, which may be what failed


def _outlive(trainer: int, seconds: float) -> None:
    """Kill this process `seconds` after its parent has ended, even if it hangs."""
    while os.getppid() == trainer:
        time.sleep(1.0)
    time.sleep(seconds)
    _kill_tree(os.getpid())


def _kill_tree(pid: int) -> None:
    """Kill a process and, on Linux, everything that it started, parents first."""
    children: list[str] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += path.read_text().split()
    if pid != os.getpid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for child in children:
        _kill_tree(int(child))
    if pid == os.getpid():
        os.kill(pid, signal.SIGKILL)


class MetricsLog:
    """metrics.jsonl: one JSON object per line, never two lines of one kind for one step.

    Training lines have "loss", evaluation lines "val_loss", and other lines "event".

    On a full disk no line is lost and training continues: lines wait in memory until there is room. Only `sync`, which
    a checkpoint relies on, and `close` raise. `sync` may run in another thread, but not during `truncate` or `close`:
    `write` does not wait for the disk.
    """

    def __init__(self, path: Path, resumed_at: int) -> None:
        """Open the log of a run that continues after step `resumed_at`, and drop later lines."""
        self._path = path
        self._recent: list[bytes] = []  # lines since the last sync, which may still be lost
        self._written = 0  # how many of them are in the file
        self._warned = False
        self._lock = threading.Lock()  # guards everything above
        self._open(resumed_at)

    def _open(self, step: int) -> None:
        """Open the file, cut to its lines up to `step`."""
        new = file_size(self._path) is None  # refuses a link to another file
        if not new:
            _drop_later(self._path, step)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        self._synced = self._end = os.fstat(self._file).st_size  # bytes on disk; bytes of whole lines
        if new:
            sync_directory(self._path.parent)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line. Others can read it at once, or as soon as there is room."""
        with self._lock:
            self._recent.append((json.dumps(line, allow_nan=False) + "\n").encode())
            try:
                self._write_recent()
            except OSError as error:
                if not self._warned:
                    warn(f"{error}: lines wait in memory until they can be written")
                self._warned = True

    def sync(self) -> None:
        """Put every line on disk.

        Raises:
            OSError: this failed for some lines. The next line, and the next call, try them again.
        """
        with self._lock:
            self._write_recent()
            count, end = len(self._recent), self._end
        try:
            os.fsync(self._file)
        except OSError as error:  # the system may have dropped what it could not write
            with self._lock:
                self._end, self._written = self._synced, 0
            raise self._with_path(error) from None
        with self._lock:
            self._synced = end
            self._recent, self._written = self._recent[count:], self._written - count

    def truncate(self, step: int) -> None:
        """Drop the lines later than `step`, because the run goes back to its checkpoint, which `sync` came before.

        Raises:
            OSError: the file cannot be truncated, and the disk is not full.
        """
        os.close(self._file)
        self._recent, self._written = [], 0
        self._open(step)

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: there is still no room for the last lines.
        """
        try:
            self._write_recent()
        finally:
            os.close(self._file)

    def _write_recent(self) -> None:
        """Append the waiting lines in order. A line that cannot be written whole is not in the file."""
        try:
            for line in self._recent[self._written :]:
                done = 0
                while done < len(line):  # a disk that is nearly full takes a part of a line, and then fails
                    done += os.pwrite(self._file, line[done:], self._end + done)
                self._written, self._end = self._written + 1, self._end + len(line)
        except OSError as error:
            with contextlib.suppress(OSError):  # the next try overwrites what is left
                os.ftruncate(self._file, self._end)
            raise self._with_path(error) from None
        self._warned = False

    def _with_path(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self._path))


def _drop_later(path: Path, step: int) -> None:
    """Keep the lines up to `step`. Usually the others come last, and cutting them off needs no room on disk."""
    content, kept = path.read_bytes(), b""
    damage: UserError | None = None
    for number, text in _numbered_lines(content):
        try:
            later = _parse(path, number, text)["step"] > step
        except UserError as error:  # after a power cut, the lines since the last sync may hold anything
            damage = damage or error
            continue
        if not later:
            if damage is not None:
                raise damage
            kept += text + b"\n"
    if content.startswith(kept):
        os.truncate(path, len(kept))
    else:
        write_atomic(path, kept)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl. An incomplete last line, left by a crash, is ignored.

    Raises:
        UserError: a line is damaged.
    """
    return [_parse(path, number, text) for number, text in _numbered_lines(path.read_bytes())]


def _numbered_lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    lines = enumerate(content.split(b"\n")[:-1], start=1)
    return ((number, text) for number, text in lines if text.strip())


def _parse(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        line: dict[str, Any] = json.loads(text.decode(errors="replace"))
        if type(line["step"]) is not int:
            raise TypeError("its step is not an integer")
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        remedy = "fix or delete that line, or use another run_dir"
        raise UserError(f"{path} is damaged in line {number} ({error}): {remedy}") from None
    return line


if __name__ == "__main__":
    _serve()
