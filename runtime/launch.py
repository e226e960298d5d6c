"""Several processes of one command on this machine: how many, and their start by torch's launcher.

The process that starts them, their parent, does not train: it forwards signals and says why a run
failed. All of them meet on the loopback interface, so no network and no host name matter.
"""

import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from common.console import console, guard_output, print_error, say
from common.exits import AGAIN
from common.settings import Settings, UserError, line_for
from runtime.distributed import LAUNCHED_HERE

_HOST = "127.0.0.1"
_SECONDS_TO_MEET = 2.0
_TOKENS_EACH = 256
"""A process has at least so many tokens of a step: with fewer, the exchange of gradients takes a
large part of its time (docs/research.md)."""

S = TypeVar("S", bound=Settings)
T = TypeVar("T")


class _InProcessError(Exception):
    """The traceback of an error in another process."""


def may_launch() -> bool:
    """Whether this process may start others: no launcher and no sweep's worker has started it."""
    return "WORLD_SIZE" not in os.environ and multiprocessing.parent_process() is None


def choose_processes(
    cores: int, sequences: int, tokens: int, bytes_each: int, free_bytes: int
) -> int:
    """The number of processes, each of one thread, that share a step on a CPU; 1: use threads.

    Args:
        sequences: of a step.
        tokens: of a step.
        bytes_each: memory that a process needs for weights, gradients and optimizer, or for
            activations, whichever is more; all together have half of `free_bytes` for each.
    """
    most = min(cores, sequences, tokens // _TOKENS_EACH)
    fits = bytes_each * most <= free_bytes // 2
    # With few processes on many cores, threads use the other cores.
    return most if fits and 4 * most >= cores else 1


def usable_cores(root: Path = Path("/")) -> int:
    """Cores for this process: what torch would use, by affinity, and by the limits of cgroups."""
    n = torch.get_num_threads()
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        n = min(n, len(os.sched_getaffinity(0)))
    for cgroup in _cgroups(root):
        quota = _words(cgroup / "cpu.max")
        quota = quota or _words(cgroup / "cpu.cfs_quota_us") + _words(cgroup / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0] not in ("max", "-1"):
            n = min(n, int(quota[0]) // int(quota[1]))
    return max(1, n)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that are available, by the system and by the limits of cgroups."""
    words = _words(root / "proc/meminfo")
    if "MemAvailable:" in words:
        free = int(words[words.index("MemAvailable:") + 1]) * 1024
    else:  # macOS
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for cgroup in _cgroups(root):
        for limit in _words(cgroup / "memory.max") + _words(cgroup / "memory.limit_in_bytes"):
            if limit != "max":
                free = min(free, int(limit))
    return free


def _cgroups(root: Path) -> Iterator[Path]:
    """The folders of this process's cgroups, of versions 1 and 2, and of those above them."""
    for word in _words(root / "proc/self/cgroup"):
        _, controllers, path = word.split(":", 2)
        for folder in (Path(path), *Path(path).parents):
            yield root / "sys/fs/cgroup" / controllers / str(folder).lstrip("/")


def _words(file: Path) -> list[str]:
    """The words of a file of the system; []: there is none."""
    try:
        return file.read_text(errors="replace").split()
    except OSError:
        return []


def launch(n: int, run: Callable[[S], T], settings: S) -> T:
    """Call run(settings) in n processes, and return the result of the first; n=1: in this one.

    Where processes cannot meet, one line says so, and this process does the work alone.

    Raises:
        UserError: what a process raised.
        SystemExit: a process was lost, or all have stopped with this status.
    """
    loopback, port = _meeting_place() if n > 1 else (None, 0)
    if loopback is None:
        if n > 1:
            say("processes cannot meet here (there is no loopback interface): one does the work")
        return run(settings)
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):  # we say what matters
        logging.getLogger(name).propagate = False
        logging.getLogger(name).addHandler(logging.NullHandler())
    # torch's launcher asks for the host's name, for logs. Without a name server it waits minutes.
    socket.getfqdn = lambda name="": name
    # A fork has imported everything already. CUDA and macOS's libraries do not survive one.
    forks = sys.platform == "linux" and not torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=n,
            run_id=LAUNCHED_HERE,
            rdzv_backend="static",
            rdzv_endpoint=f"{_HOST}:{port}",
            rdzv_configs={"rank": 0},
            local_addr=_HOST,
            max_restarts=0,
            start_method="fork" if forks else "spawn",
            signals_to_handle="SIGQUIT",  # others are the command's
            logs_specs=DefaultLogsSpecs(folder),
        )
        try:
            results = elastic_launch(config, _work)(loopback, run, settings)
        except ChildFailedError as error:
            _raise_cause(error)
    status, result = results[0]
    if status is not None:
        raise SystemExit(status)
    return result


def _meeting_place() -> tuple[str | None, int]:
    """The loopback interface, and a free port on it; None: processes cannot connect there."""
    try:
        with socket.create_server((_HOST, 0)) as server:
            address = server.getsockname()
            socket.create_connection(address, _SECONDS_TO_MEET).close()
    except OSError:
        return None, 0
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return next(iter(names), None), address[1]


def _work(loopback: str, run: Callable[[S], T], settings: S) -> tuple[int | str | None, T | None]:
    """In each process: call run(settings); return the exit status that it asks for, or None, and
    its result."""
    parent = os.getppid()
    # Signals are this process's own, no longer those of the parent that it is a fork of.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    console.quiet = os.environ["RANK"] != "0"
    guard_output(lossy=True)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback  # else gloo looks up the host's name
    try:
        return None, run(settings)
    except SystemExit as stopped:
        return stopped.code, None
    except Exception as error:
        line = line_for(error)
        if line is None:
            raise
        raise UserError(line) from error
    finally:
        sys.stdout.flush()
        if os.getppid() != parent:  # it is dead, and torch's launcher would wait for it
            os._exit(AGAIN)


def _raise_cause(error: ChildFailedError) -> NoReturn:
    """Raise what ended a process, or say it and raise SystemExit."""
    rank, failure = error.get_first_failure()
    recorded = failure.error_file_data["message"]
    if isinstance(recorded, dict):
        cause = _InProcessError(f"process {rank}\n{recorded['extraInfo']['py_callstack']}")
        kind, _, line = recorded["message"].partition(": ")
        if kind == "UserError":
            raise UserError(line) from cause
        raise RuntimeError(f"process {rank} failed: {kind}: {line}") from cause
    why = f"process {rank} was ended by {failure.signal_name()}"
    if failure.exitcode == -signal.SIGKILL:
        why += " (for lack of memory? Then use fewer runtime.processes)"
    if failure.exitcode > 0:
        why = "processes lost contact with each other"
    print_error(f"{why}: start the same command again")
    raise SystemExit(AGAIN) from None
