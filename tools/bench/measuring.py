"""Helpers of all measurements: turns, the machine, configurations and tables."""

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

from cli import compose
from common.commit import git_commit
from common.console import Track, show_table, table_of
from common.settings import JsonDict, UserError

K = TypeVar("K")
R = TypeVar("R")


def call_in_process(function: Callable[..., R], *arguments: Any) -> R:
    """Call a function of a module in a new process.

    Raises:
        UserError: it raised one.
        RuntimeError: it raised another error, or its process crashed.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_with_plain_errors, function, *arguments).result()


def _with_plain_errors(function: Callable[..., R], *arguments: Any) -> R:
    try:
        return function(*arguments)
    except UserError:
        raise
    except Exception as error:  # the compiler's errors cannot be sent to another process
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def call_in_turn(runs: Mapping[K, Callable[[], R]], rounds: int) -> dict[K, list[R]]:
    """Call every run once per round, and return its results by name.

    The order is random in each round, so that other load on the machine slows all runs alike.
    """
    results: dict[K, list[R]] = {name: [] for name in runs}
    with Track("measuring: run", rounds * len(runs)) as track:
        for _ in range(rounds):
            for name in random.sample(list(runs), len(runs)):
                results[name].append(runs[name]())
                track.advance(1)
    return results


def time_call(run: Callable[[], object]) -> float:
    """Call `run` and return how many seconds it took."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def describe_machine() -> JsonDict:
    """Return the machine and the versions that figures depend on."""
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return {
        "cpu": cpu[1] if cpu else platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "git_commit": git_commit(),
    }


def print_table(title: str, rows: Sequence[JsonDict]) -> None:
    """Print rows as a table, a column for each key of the first row."""
    names = [key.replace("_", " ") for key in rows[0]]
    table = table_of(names[:1], names[1:])
    table.title = title
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in rows[0]))
    show_table(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def compose_run(overrides: Iterable[str]) -> JsonDict:
    """Return the configuration of train.py with these options; no data is read."""
    return compose("train", ["dataset_dir=none", *overrides])
