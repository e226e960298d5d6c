"""Helpers of all measurements: turns, profiles, the machine, configurations and tables."""

import multiprocessing
import os
import platform
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from cli import compose, to_dict
from common.commit import git_commit
from common.console import say, show_table, table_of
from common.settings import UserError

Row = dict[str, Any]
K = TypeVar("K")
R = TypeVar("R")
_KERNELS_SHOWN = 30
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "aten::_local_scalar_dense",
)
"""Calls in which the CPU waits for a GPU. The last is item(), which also counts on a CPU."""

failures: dict[str, str] = {}
"""Why what `attempt` ran failed, by name."""


def attempt(name: str, run: Callable[[], R]) -> R | None:
    """Return the result of `run`; if it fails, say why in one line and return None, so that the
    others go on."""
    try:
        return run()
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}".partition("\n")[0].removeprefix(
            "RuntimeError: "
        )
        say(f"{name} fails: {failures[name]}")
        return None


def in_own_process(function: Callable[..., R], *arguments: Any) -> R:
    """Call a function of a module in a new process.

    Raises:
        UserError: it raised one.
        RuntimeError: it raised another error, or its process crashed.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_plainly, function, *arguments).result()


def _plainly(function: Callable[..., R], *arguments: Any) -> R:
    try:
        return function(*arguments)
    except Exception as error:  # the compiler's cannot be sent to another process
        raise (
            error
            if isinstance(error, UserError)
            else RuntimeError(f"{type(error).__name__}: {error}")
        ) from None


def in_turn(runs: Mapping[K, Callable[[], R]], rounds: int, warm_up: int = 0) -> dict[K, list[R]]:
    """Call every run once per round, in random order, so that other load on the machine slows all
    of them alike.

    Returns what each run returned in each round, without the first `warm_up` rounds.
    """
    results: dict[K, list[R]] = {name: [] for name in runs}
    for _ in range(warm_up + rounds):
        for name in random.sample(list(runs), len(runs)):
            results[name].append(runs[name]())
    return {name: found[warm_up:] for name, found in results.items()}


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """Return a function that calls `run` and returns how many seconds it took."""

    def seconds() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return seconds


def profiled(run: Callable[[], object], calls: int = 3) -> list[Row]:
    """Return the kernels of one call by the time that they take, then the waits of the CPU for a
    GPU."""
    run()  # compiles, and allocates memory
    on_gpu = torch.cuda.is_initialized()
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    ) as profiler:
        for _ in range(calls):
            run()
        if on_gpu:
            torch.cuda.synchronize()
    events = profiler.key_averages()
    # A GPU may hide its counters.
    on_device = any(event.self_device_time_total for event in events)
    key = f"self_{'device' if on_device else 'cpu'}_time_total"
    total = sum(getattr(event, key) for event in events)
    events = sorted(events, key=lambda event: -getattr(event, key))
    shown = [
        *events[:_KERNELS_SHOWN],
        *(event for event in events[_KERNELS_SHOWN:] if event.key in WAITS),
    ]
    return [
        {
            "kernel": event.key[:100],
            "calls": event.count / calls,
            "ms": time / calls / 1e3,
            "share": time / total,
        }
        for event in shown
        for time in [getattr(event, key)]
    ]


def cpu_name() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    return name[1] if name else platform.processor() or platform.machine()


def machine() -> Row:
    """Return the machine and the versions that figures depend on."""
    return {
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "git_commit": git_commit(),
    }


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Print rows as a table, a column for each key; the first is left-aligned, and what a row lacks
    is empty."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    names = [key.replace("_", " ") for key in keys]
    table = table_of(names[:1], names[1:])
    table.title = title
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in keys))
    show_table(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value or ""


def composed(overrides: Iterable[str]) -> Row:
    """Return the configuration of train.py with these options; no data is read."""
    return to_dict(compose("train", ["dataset_dir=none", *overrides]))
