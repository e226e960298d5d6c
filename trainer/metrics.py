"""Where a run's numbers go: metrics.jsonl always, wandb if asked for. The only file that imports wandb."""

import contextlib
import json
import os
import queue
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


class LocalTrackerConfig(Settings):
    """metrics.jsonl and loss.png in the run directory; no account."""

    name: Literal["local"]
    every: int = Field(1, ge=1)
    """Steps between training lines."""

    def open(self, run_id: str, run_dir: Path, config: dict[str, Any]) -> "Tracker":
        """The tracker of a run."""
        return Tracker()


class WandbTrackerConfig(Settings):
    """The same lines to Weights & Biases too. Training goes on whatever becomes of it."""

    name: Literal["wandb"]
    every: int = Field(10, ge=1)
    """Steps between training lines."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """offline writes under the run directory, for `wandb sync` later."""
    project: str = "log-gpt"
    """wandb's project."""
    run_name: str | None = None
    """Name of the run in wandb; null: the run directory's."""
    finish_seconds: float = Field(60.0, gt=0)
    """How long the end of training waits for the last uploads."""

    def open(self, run_id: str, run_dir: Path, config: dict[str, Any]) -> "Tracker":
        """The tracker of a run."""
        settings = {
            "id": run_id,
            "resume": "allow",
            "mode": self.mode,
            "project": self.project,
            "name": self.run_name or run_dir.name,
            "dir": str(run_dir),
            "config": config,
            "settings": {"program": sys.argv[0], "x_stats_pid": os.getpid()},  # of this process, not of wandb's own
        }
        return WandbTracker(settings, self.finish_seconds)


TrackerConfig = Annotated[LocalTrackerConfig | WandbTrackerConfig, Field(discriminator="name")]


class Tracker:
    """Takes the lines of metrics.jsonl elsewhere; this one, nowhere."""

    def log(self, line: dict[str, Any]) -> None:
        """Take a line. Never blocks, never raises."""

    def finish(self) -> None:
        """Hand over what is left, in bounded time."""


class WandbTracker(Tracker):
    """wandb in a process of its own: whatever hangs, fails or crashes there costs a warning, never the run.

    Inside this process it could not be given up: it wraps stdout and stderr, and at exit it waits for its service
    process without a limit. A process, and all that it started, can be killed.
    """

    def __init__(self, settings: dict[str, Any], finish_seconds: float) -> None:
        self._finish_seconds = finish_seconds
        self._lines: queue.Queue[Any] = queue.Queue(maxsize=10_000)
        self._lines.put({"settings": settings, "trainer": os.getpid(), "finish_seconds": finish_seconds})
        self._lost, self._lock = False, threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._threads: list[threading.Thread] = []
        try:
            self._process = _start_process()
        except OSError as error:
            return self._give_up(str(error))
        self._threads = [
            threading.Thread(target=self._send, args=(self._process.stdin,), name="wandb", daemon=True),
            threading.Thread(target=self._hear, args=(self._process, self._process.stdout), name="wandb", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return None

    def log(self, line: dict[str, Any]) -> None:
        """Queue a line; if wandb is that far behind, or gone, the line is in metrics.jsonl alone."""
        if not self._lost:
            try:
                self._lines.put_nowait(line)
            except queue.Full:
                self._give_up("it does not keep up")

    def finish(self) -> None:
        """Wait for the last lines, but no longer than finish_seconds; then nothing of wandb is left running."""
        if self._lost:
            return
        deadline = time.monotonic() + self._finish_seconds
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=self._finish_seconds)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._give_up(f"it did not finish within {self._finish_seconds:g} seconds")

    def _send(self, lines: IO[str]) -> None:
        """The lines to the process, as JSON; the last one is null."""
        with contextlib.suppress(OSError), lines:  # `_hear` hears how it ended
            line: Any = {}
            while line is not None and not self._lost:
                line = self._lines.get()
                lines.write(json.dumps(line) + "\n")
                lines.flush()

    def _hear(self, process: "subprocess.Popen[str]", reports: IO[str]) -> None:
        """What the process reports, until it ends."""
        with reports:
            for text in reports:
                report = json.loads(text)
                if "url" in report:
                    say(f"wandb: {report['url']}")
                else:
                    self._give_up(report["error"])
        if status := process.wait():
            self._give_up(f"its process ended with status {status}")

    def _give_up(self, why: str) -> None:
        with self._lock:
            if self._lost:
                return
            self._lost = True
        if self._process is not None and self._process.poll() is None:
            _kill_tree(self._process.pid)
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)  # wakes the thread that waits for a line
        warn(f"wandb failed ({why}); training goes on, and metrics.jsonl has every line")


def _start_process() -> "subprocess.Popen[str]":
    """This file as a program, deaf to the signals that training is stopped with: it ends when its input does.

    Raises:
        OSError: there is no room for one more process.
    """
    deaf_to = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, deaf_to)  # a new process inherits it, from its first moment on
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer.metrics"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve() -> None:
    """The program of wandb's process: lines from WandbTracker on stdin, reports to it on stdout."""
    lines, reports = (os.fdopen(os.dup(fd), mode, encoding="utf-8") for fd, mode in ((0, "r"), (1, "w")))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)  # wandb's service process would inherit the pipes, and keep them open

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
        # A resumed run sends some steps again: as an axis of its own, steps need not grow.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        line: Any = {}
        for text in lines:
            if (line := json.loads(text)) is not None:
                run.log(line)
        run.finish(exit_code=int(line is not None))  # no last word: training was killed
    except BaseException as error:  # wandb's failures are many, and none of them is worth a run
        with contextlib.suppress(OSError):
            report(error=" ".join(f"{type(error).__name__}: {error}".split()))
        _kill_tree(os.getpid())  # leaving would wait for its service process, which may be what failed


def _outlive(trainer: int, seconds: float) -> None:
    """Let this process live no longer than so much after its parent, wherever it hangs."""
    while os.getppid() == trainer:
        time.sleep(1.0)
    time.sleep(seconds)
    _kill_tree(os.getpid())


def _kill_tree(pid: int) -> None:
    """Kill a process and all that it started, as far as the system tells (Linux does), the parents first."""
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
    """metrics.jsonl: one JSON object a line, appended; never two lines of one kind for one step.

    Lines of training have "loss", lines of an evaluation "val_loss", and others "event".

    A disk without room costs no line and stops nothing: lines wait in memory until there is room. Only `sync`, which
    a checkpoint counts on, and `close` raise. `sync` may run in another thread: `write` does not wait for the disk.
    """

    def __init__(self, path: Path, resumed_at: int) -> None:
        """Open the log of a run that continues after step `resumed_at`: later lines are dropped, to come again."""
        self._path = path
        self._recent: list[bytes] = []  # lines since the last sync, which may still be lost
        self._written = 0  # how many of them are in the file
        self._warned = False
        self._lines = threading.Lock()  # all that is above
        self._disk = threading.Lock()  # the file stays open and is not cut; taken before _lines
        self._open(resumed_at)

    def _open(self, step: int) -> None:
        """Open the file, cut to its lines up to `step`."""
        new = file_size(self._path) is None  # in a stranger's run it could be a link to another file: refused
        if not new:
            _drop_later(self._path, step)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        self._synced = self._end = os.fstat(self._file).st_size  # bytes on disk; bytes of whole lines
        if new:
            sync_directory(self._path.parent)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line; others can read it at once, or as soon as there is room."""
        with self._lines:
            self._recent.append((json.dumps(line, allow_nan=False) + "\n").encode())
            self._write_or_wait()

    def sync(self) -> None:
        """Have every line on disk, before a checkpoint that counts on them.

        Raises:
            OSError: some are not; they are tried again with the next line, and by the next call.
        """
        with self._disk:
            with self._lines:
                self._write_recent()
                count, end = len(self._recent), self._end
            try:
                os.fsync(self._file)
            except OSError as error:  # some systems tell only now, and forget what they could not write
                with self._lines:
                    self._end, self._written = self._synced, 0
                raise self._named(error) from None
            with self._lines:
                self._synced = end
                self._recent, self._written = self._recent[count:], self._written - count

    def truncate(self, step: int) -> None:
        """Drop the lines later than `step`: the run goes back to it, and they come again.

        Raises:
            OSError: the file could not be cut; a full disk is no reason.
        """
        with self._disk, self._lines:
            old = self._file
            os.ftruncate(old, self._synced)
            self._open(step)
            os.close(old)
            self._recent = [line for line in self._recent if json.loads(line)["step"] <= step]
            self._written = 0
            self._write_or_wait()

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: there still is no room for the last lines.
        """
        with self._disk, self._lines:
            try:
                self._write_recent()
            finally:
                os.close(self._file)

    def _write_or_wait(self) -> None:
        """Put the lines that wait into the file; where that cannot be, warn once."""
        try:
            self._write_recent()
        except OSError as error:
            if not self._warned:
                warn(f"{error}: lines wait in memory until they can be written")
            self._warned = True

    def _write_recent(self) -> None:
        """Put the lines that wait at the end of the file, in order; one that cannot be written whole is not there."""
        try:
            for line in self._recent[self._written :]:
                _write_at(self._file, line, self._end)
                self._written, self._end = self._written + 1, self._end + len(line)
        except OSError as error:
            with contextlib.suppress(OSError):  # what is left then, the next try overwrites
                os.ftruncate(self._file, self._end)
            raise self._named(error) from None
        self._warned = False

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self._path))


def _write_at(file: int, data: bytes, position: int) -> None:
    """All of `data`: a disk that is nearly full takes a part of it first, and fails at the next."""
    while data:
        count = os.pwrite(file, data, position)
        data, position = data[count:], position + count


def _drop_later(path: Path, step: int) -> None:
    """Leave the lines up to `step`. Those dropped nearly always come last: to cut a file off needs no room on disk."""
    content, kept = path.read_bytes(), b""
    damage: UserError | None = None  # a power cut may leave any bytes after what was synced: lines to be dropped anyway
    for text, line in _parse(path, content):
        if isinstance(line, UserError):
            damage = damage or line
        elif line["step"] <= step:
            if damage is not None:
                raise damage
            kept += text
    if content.startswith(kept):
        os.truncate(path, len(kept))
    else:
        write_atomic(path, kept)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, without a last one that a crash cut short.

    Raises:
        UserError: a line is none of a run's.
    """
    lines = []
    for _, line in _parse(path, path.read_bytes()):
        if isinstance(line, UserError):
            raise line
        lines.append(line)
    return lines


def _parse(path: Path, content: bytes) -> Iterator[tuple[bytes, dict[str, Any] | UserError]]:
    """Each whole line of `content`, the file at `path`, as it stands there and as what it says, or what is wrong."""
    for number, text in enumerate(content.split(b"\n")[:-1], start=1):
        if text.strip():
            try:
                line = json.loads(text.decode(errors="replace"))
                if type(line["step"]) is not int:
                    raise TypeError("its step is no whole number")
            except (ValueError, RecursionError, TypeError, KeyError) as error:
                remedy = "mend or delete that line, or use another run_dir"
                line = UserError(f"{path} is damaged in line {number} ({error}): {remedy}")
            yield text + b"\n", line


if __name__ == "__main__":
    _serve()
