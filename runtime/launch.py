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
from model.config import GPTConfig
from model.gpt import GPT
from runtime.device import ProcessesConfig
from runtime.distributed import LAUNCHED_HERE

_HOST = "127.0.0.1"
_SECONDS_TO_MEET = 2.0
_TOKENS_EACH = 256
"""A process has at least so many tokens of a step: with fewer, the exchange of gradients takes a
large part of its time (docs/research.md)."""
_BYTES_OF_PARAMETER = 16
"""Weight, gradient, and two numbers of the optimizer, in float32."""
_BYTES_OF_FEATURE = 128
"""What a layer keeps for the backward pass, for each feature of a token. Our models keep 33 to 129
(tools/step_memory.py)."""

S = TypeVar("S", bound=Settings)
T = TypeVar("T")


def given_processes(config: ProcessesConfig) -> int | None:
    """The number of processes, if it need not be chosen; None: choose it.

    None are started in processes of a launcher (WORLD_SIZE is set) or of a sweep.
    """
    is_worker = multiprocessing.current_process().name != "MainProcess"
    if "WORLD_SIZE" in os.environ or is_worker:
        return 1
    if config.processes != "auto":
        return config.processes
    return 1 if config.device != "cpu" and torch.cuda.is_available() else None


def choose_processes(model: GPTConfig, sequences: int, tokens: int, kept: int) -> int:
    """The number of processes, each of one thread, that share a step on this CPU; 1: use threads.

    Args:
        sequences: of a step; `tokens` too.
        kept: tokens whose activations a process keeps, times the layers that it keeps them for.
    """
    with torch.device("meta"):
        n_params = GPT(model).n_params()
    bytes_each = max(_BYTES_OF_PARAMETER * n_params, _BYTES_OF_FEATURE * model.n_embd * kept)
    return _choose(usable_cores(), sequences, tokens, bytes_each, free_memory())


def _choose(cores: int, sequences: int, tokens: int, bytes_each: int, free_bytes: int) -> int:
    n = min(cores, sequences, tokens // _TOKENS_EACH)
    fits = n * bytes_each <= free_bytes // 2  # the weights; the activations have the other half
    # With few processes on many cores, threads use the other cores.
    return n if fits and 4 * n >= cores else 1


def usable_cores(root: Path = Path("/")) -> int:
    """Cores for this process: what torch would use, by affinity, and by the limits of cgroups."""
    n = torch.get_num_threads()
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        n = min(n, len(os.sched_getaffinity(0)))
    for quota in _limits(root, "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        if quota[0] not in ("max", "-1"):
            n = min(n, int(quota[0]) // int(quota[1]))
    return max(1, n)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that are available, by the system and by the limits of cgroups."""
    words = _words(root / "proc/meminfo")
    if words:
        free = int(words[words.index("MemAvailable:") + 1]) * 1024
    else:  # macOS
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = _limits(root, "memory.max", "memory.limit_in_bytes")
    return min([free, *(int(limit) for limit, *_ in limits if limit != "max")])


def _limits(root: Path, *files: str) -> Iterator[list[str]]:
    """The words of these files, which are of cgroups of version 2 or 1, for each cgroup above this
    process that has some."""
    for line in _words(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for folder in (Path(path), *Path(path).parents):
            cgroup = root / "sys/fs/cgroup" / controllers / str(folder).lstrip("/")
            words = [word for file in files for word in _words(cgroup / file)]
            if words:
                yield words


def _words(file: Path) -> list[str]:
    """The words of a file of the system; []: there is none."""
    return file.read_text().split() if file.is_file() else []


def launch_processes(n: int, run: Callable[[S], T], settings: S) -> T:
    """Call run(settings) in n processes, and return the result of the first; n=1: in this one.

    Where processes cannot meet, one line says so, and this process does the work alone.

    Raises:
        UserError: what a process raised.
        SystemExit: a process was lost, or all have stopped with this status.
    """
    place = _meeting_place() if n > 1 else None
    if place is None:
        return run(settings)
    # Configure torch's launcher for this machine alone.
    loopback, port = place
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
        # Start the processes, and wait for all of them.
        try:
            results = elastic_launch(config, _work)(loopback, run, settings)
        except ChildFailedError as error:
            _raise_cause(error)
    status, result = results[0]
    if status is not None:
        raise SystemExit(status)
    return result


def _meeting_place() -> tuple[str, int] | None:
    """The loopback interface, and a free port on it; None: processes cannot connect there."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    try:
        with socket.create_server((_HOST, 0)) as server:
            socket.create_connection(server.getsockname(), _SECONDS_TO_MEET).close()
            return names[0], server.getsockname()[1]
    except (OSError, IndexError):
        say("processes cannot meet here (there is no loopback interface): one does the work")
        return None


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
    """Raise the UserError that ended a process, or say what did and raise SystemExit."""
    rank, failure = error.get_first_failure()
    recorded = failure.error_file_data["message"]
    if isinstance(recorded, dict):
        kind, _, line = recorded["message"].partition(": ")
        if kind == "UserError":
            raise UserError(line)
        sys.stderr.write(recorded["extraInfo"]["py_callstack"])
        raise SystemExit(1)
    why = f"process {rank} was ended by {failure.signal_name()}"
    if failure.exitcode == -signal.SIGKILL:
        why += " (for lack of memory? Then use fewer runtime.processes)"
    if failure.exitcode > 0:
        why = "processes lost contact with each other"
    print_error(f"{why}: start the same command again")
    raise SystemExit(AGAIN) from None
