"""Sweep jobs that run in parallel: they share GPUs, and save before they end."""

import contextlib
import functools
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import FrameType

from common.console import guard_output, say
from common.exits import AGAIN, end_process_at_once
from common.files import hold_lock
from common.settings import UserError

_SECONDS_BETWEEN_LOOKS = 1.0
_held = contextlib.ExitStack()  # this process's GPU, until it ends


@contextlib.contextmanager
def share_machine(launcher: str) -> Iterator[None]:
    """Run a job of a sweep as its launcher needs it.

    Launcher "basic" runs one job after the other, and needs nothing.
    """
    guard_output(lossy=True)
    is_worker = multiprocessing.current_process().name != "MainProcess"
    if launcher == "joblib" and is_worker:  # with n_jobs=1, the sweep itself runs the jobs
        parent = end_with_parent()
        take_gpu()
        try:
            yield
        finally:
            if os.getppid() != parent:  # joblib's worker would wait for jobs for ever
                os._exit(AGAIN)
    else:
        yield


@functools.cache
def end_with_parent() -> int:
    """Save and stop this worker when its sweep ends in any way.

    Returns:
        The process id of the sweep.
    """
    parent = os.getppid()
    os.setpgid(0, 0)  # a terminal's Ctrl-C is for the parent

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()
    return parent


def let_workers_save() -> None:
    """Let Ctrl-C end this process only: joblib would kill its workers while they save."""

    def leave(number: int, frame: FrameType | None) -> None:
        end_process_at_once(
            128 + number,
            "interrupted; the jobs save their steps, and the same command continues them",
        )

    signal.signal(signal.SIGINT, leave)
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")  # harmless


@functools.cache
def take_gpu() -> None:
    """Reserve a GPU for this process before CUDA starts: the one that the fewest workers have.

    Lock files in a folder of this user record which GPU each running worker uses, across all
    sweeps.
    """
    gpus = visible_gpus()
    if not gpus:
        return
    folder = Path(tempfile.gettempdir()) / f"log-gpt-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # First a GPU that no worker has, then one that a single worker has, and so on.
    for number in count():
        for gpu in gpus:
            lock = folder / f"gpu-{gpu.replace('/', '-')}-{number}.lock"
            with contextlib.suppress(UserError):  # another worker has it
                _held.enter_context(hold_lock(lock, lambda: "taken"))
                os.environ["CUDA_VISIBLE_DEVICES"] = gpu
                return say(f"process {os.getpid()} trains on GPU {gpu}")


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    CUDA is not started.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        import torch  # slow, and --help needs none of it

        return [str(number) for number in range(torch.cuda.device_count())]
    return [gpu.strip() for gpu in named.split(",") if gpu.strip() not in ("", "-1")]
