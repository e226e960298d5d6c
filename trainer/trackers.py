"""Sends a run's metrics to wandb and TensorBoard, if asked to. The only file that imports them."""

import contextlib
import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from common.console import console, errors, say, warn
from common.settings import Settings

_PIPE_BYTES = 2**20  # the most that Linux gives to any user


class WandbConfig(Settings, defaults="tracker/wandb:wandb"):
    """Sends the metrics to Weights & Biases. Training goes on even if that fails."""

    every: int = Field(ge=1)
    """Steps between training lines that are sent."""
    mode: Literal["online", "offline", "disabled"]
    """offline writes under the run directory, for `wandb sync` later."""
    project: str
    """wandb's project."""
    run_name: str | None
    """Name of the run in wandb; null: the name of the run directory."""
    finish_seconds: float = Field(gt=0)
    """Longest time that the end of training waits for the last uploads."""

    def open(self, run_id: str, run_dir: Path, config: dict[str, Any]) -> "WandbTracker":
        """Start the tracker of a run."""
        settings = {"program": sys.argv[0], "x_stats_pid": os.getpid()}  # this process, not the one that wandb runs in
        about = {"project": self.project, "name": self.run_name or run_dir.name, "dir": str(run_dir), "config": config}
        how = {"id": run_id, "resume": "allow", "mode": self.mode, "settings": settings}
        return WandbTracker(about | how, self.finish_seconds)


class TensorBoardConfig(Settings, defaults="tracker/tensorboard:tensorboard"):
    """Writes the metrics for TensorBoard to the folder tensorboard in the run directory."""

    every: int = Field(ge=1)
    """Steps between training lines that are written."""


class TrackerConfig(Settings, defaults="train:tracker"):
    """Where the metrics go, besides metrics.jsonl and loss.png."""

    wandb: WandbConfig | None
    """Weights & Biases; null: not used."""
    tensorboard: TensorBoardConfig | None
    """TensorBoard; null: not used."""

    def import_packages(self) -> None:
        """Import what is not installed everywhere, before anything is made.

        Raises:
            ModuleNotFoundError: a package is missing.
        """
        if self.tensorboard is not None:
            importlib.import_module("tensorboard")


class Trackers:
    """All trackers of a run. Each receives every line; of the training lines, only one every `every` steps.

    No method of a tracker raises, and `finish` takes bounded time.
    """

    def __init__(
        self, config: TrackerConfig, run_id: str, run_dir: Path, settings: dict[str, Any], resumed_at: int
    ) -> None:
        """Start the trackers of a run with these settings, which goes on after the step `resumed_at`, or is new (0)."""
        self._trackers: list[tuple[int, WandbTracker | TensorBoardTracker]] = []
        if (wandb := config.wandb) is not None:
            self._trackers.append((wandb.every, wandb.open(run_id, run_dir, settings)))
        if (tensorboard := config.tensorboard) is not None:
            self._trackers.append((tensorboard.every, TensorBoardTracker(run_dir / "tensorboard", resumed_at)))

    def log(self, line: dict[str, Any]) -> None:
        """Hand on a line."""
        for every, tracker in self._trackers:
            if "loss" not in line or line["step"] % every == 0:
                tracker.log(line)

    def finish(self) -> None:
        """Send what is left, in bounded time."""
        for _, tracker in self._trackers:
            tracker.finish()


class TensorBoardTracker:
    """Writes event files; training waits while their disk does not answer.

    TensorBoard ignores the earlier lines of steps that a run repeats.
    """

    def __init__(self, folder: Path, resumed_at: int) -> None:
        self._folder, self._failed = folder, False
        self._open(resumed_at)

    def _open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here, because importing it is slow

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)

    def log(self, line: dict[str, Any]) -> None:
        """Write the numbers of a line. After a failure, lines are in metrics.jsonl only."""
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "step"}
        for key, value in numbers.items():
            self._try(partial(self._writer.add_scalar, key, value, line["step"]))

    def finish(self) -> None:
        """Write what is left."""
        self._try(self._writer.close)

    def _try(self, write: Callable[[], None]) -> None:
        """Write, unless that has failed before."""
        if not self._failed:
            try:
                write()
            except Exception as error:  # no failure of TensorBoard is worth a run
                self._failed = True
                why = " ".join(f"{type(error).__name__}: {error}".split())
                warn(f"tensorboard failed ({why}); training goes on, and metrics.jsonl has every line")


class WandbTracker:
    """Runs wandb in a separate process: if wandb hangs, fails or crashes, training continues with a warning.

    In this process, wandb would wrap stdout and stderr, and wait for its service process at exit without a limit. A
    process, with all that it started, can be killed. It prints its own reports, and gets lines of JSON through a pipe,
    which holds some thousands of them.
    """

    def __init__(self, settings: dict[str, Any], finish_seconds: float) -> None:
        self._finish_seconds = finish_seconds
        self._process = _start_process()
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)
        self.log({"settings": settings, "trainer": os.getpid(), "finish_seconds": finish_seconds})

    def log(self, line: dict[str, Any]) -> None:
        """Send a line. If wandb is too far behind, or gone, the line is in metrics.jsonl only."""
        if not self._pipe.closed:
            try:
                data = json.dumps(line).encode() + b"\n"
                if os.write(self._pipe.fileno(), data) < len(data):  # the pipe holds less
                    raise BlockingIOError
            except BlockingIOError:
                self._kill("it does not keep up")
            except BrokenPipeError:
                self._wait()

    def finish(self) -> None:
        """Wait for the last lines, but no longer than finish_seconds. Afterwards, nothing of wandb is running."""
        self.log({})  # the end: without it, training was killed
        if not self._pipe.closed:
            self._wait()

    def _wait(self) -> None:
        self._pipe.close()
        try:
            if status := self._process.wait(self._finish_seconds):
                _warn(f"its process ended with status {status}")
        except subprocess.TimeoutExpired:
            self._kill(f"it did not finish within {self._finish_seconds:g} seconds")

    def _kill(self, why: str) -> None:
        self._pipe.close()
        _kill_tree(self._process.pid)
        self._process.wait()
        _warn(why)


def _warn(why: str) -> None:
    warn(f"wandb failed ({why}); training goes on, and metrics.jsonl has every line")


def _start_process() -> "subprocess.Popen[bytes]":
    """Run this file as a program that ignores the signals that stop training: it ends when its input does."""
    ignored = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)  # a new process inherits the mask
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer.trackers"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            bufsize=0,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # a user has only so much memory for pipes: then it holds fewer lines
        fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return process


def _serve() -> None:
    """Run wandb with the lines that WandbTracker sends."""
    lines, console.file, errors.file = (os.fdopen(os.dup(fd), mode) for fd, mode in ((0, "r"), (1, "w"), (2, "w")))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)  # for wandb, and for its service process, which would keep the pipes open
    try:
        first = json.loads(lines.readline())
        limit = (first["trainer"], first["finish_seconds"])
        threading.Thread(target=_outlive, args=limit, daemon=True).start()
        import wandb

        run = wandb.init(**first["settings"])
        if url := getattr(run, "url", None):
            say(f"wandb: {url}")
        # A resumed run repeats some steps: with an axis of their own, steps need not increase.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        line: Any = None
        for text in lines:
            if line := json.loads(text):
                run.log(line)
        run.finish(exit_code=int(line != {}))
    except BaseException as error:  # no failure of wandb is worth a run
        with contextlib.suppress(OSError):
            _warn(" ".join(f"{type(error).__name__}: {error}".split()))
        _kill_tree(os.getpid())  # a normal exit would wait for its service process, which may be what failed


def _outlive(trainer: int, seconds: float) -> None:
    """End this process `seconds` after its parent has ended, even if it hangs."""
    while os.getppid() == trainer:
        time.sleep(1.0)
    time.sleep(seconds)
    _kill_tree(os.getpid())


def _kill_tree(pid: int) -> None:
    """Kill a process and, on Linux, everything that it started, parents first. This process itself just ends."""
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
        os._exit(0)


if __name__ == "__main__":
    _serve()
