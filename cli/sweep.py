"""A job among others: what a run of a sweep owes the sweep it is part of, and the machine it shares."""

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

import torch

from common.console import errors, say
from common.exits import AGAIN
from common.lock import owned
from common.settings import UserError

_SECONDS_BETWEEN_LOOKS = 1.0
_held = contextlib.ExitStack()  # this process's GPU, until it ends


@contextlib.contextmanager
def among_others(launcher: str) -> Iterator[None]:
    """What a sweep's job is run in. `launcher`: the name of Hydra's; "basic" runs one job after the other."""
    if launcher == "joblib" and multiprocessing.current_process().name != "MainProcess":  # which may do the jobs itself
        parent = end_with_parent()
        take_gpu()
        try:
            yield
        finally:
            if os.getppid() != parent:  # nobody is left to hear of it, and joblib's worker would wait for more to do
                os._exit(AGAIN)
    elif launcher.startswith("submitit"):
        with saving_before_requeue():
            yield
    else:
        yield


@functools.cache
def end_with_parent() -> int:
    """Have this worker stopped, its step saved, when its sweep has ended, however; returns the parent's id."""
    parent = os.getppid()
    os.setpgid(0, 0)  # a terminal's Ctrl-C is for the parent

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()
    return parent


def let_workers_save() -> None:
    """Have Ctrl-C end this process, and nothing else: joblib would kill its workers while they save."""

    def leave(number: int, frame: FrameType | None) -> None:
        errors.print(
            "error: interrupted; the jobs save their steps, and the same command goes on with them", style="red"
        )
        os._exit(128 + number)

    signal.signal(signal.SIGINT, leave)
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")  # says what it then clears away


@functools.cache
def take_gpu() -> None:
    """Leave this process one GPU, before CUDA is started: of those that it sees, one that the fewest others have.

    Who has which is known by locks in a folder of the user's, on this machine: of all sweeps' processes, alive ones.
    """
    gpus = visible_gpus()
    if not gpus:
        return
    folder = Path(tempfile.gettempdir()) / f"log-gpt-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for number, gpu in ((number, gpu) for number in count() for gpu in gpus):
        with contextlib.suppress(UserError):  # it is another's
            _held.enter_context(owned(folder / f"gpu-{gpu.replace('/', '-')}-{number}.lock", lambda: "taken"))
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
            say(f"process {os.getpid()} trains on GPU {gpu}")
            return


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Does not start CUDA."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(number) for number in range(torch.cuda.device_count())]
    return [gpu.strip() for gpu in named.split(",") if gpu.strip() not in ("", "-1")]


@contextlib.contextmanager
def saving_before_requeue() -> Iterator[None]:
    """SIGUSR2, with which submitit requeues a job whose time is up, first has the step saved."""
    requeue, asked = signal.getsignal(signal.SIGUSR2), False

    def save_first(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if callable(signal.getsignal(signal.SIGUSR1)):  # training is under way: StopSignals
            signal.raise_signal(signal.SIGUSR1)
        elif callable(requeue):
            requeue(number, frame)

    signal.signal(signal.SIGUSR2, save_first)
    try:
        yield
    except SystemExit:
        if asked and callable(requeue):
            requeue(signal.SIGUSR2, None)  # raises another SystemExit, or what submitit says of a job's last time out
        raise
    finally:
        signal.signal(signal.SIGUSR2, requeue)
