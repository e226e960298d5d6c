"""What all benchmarks share: taking turns, ratios, the machine, one kind of table, runs, and bench.json."""

import functools
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from pydantic_core import to_jsonable_python
from rich.table import Table

from cli import compose, to_dict
from common.commit import git_commit
from common.console import say, show_table
from common.files import make_directory, write_json
from common.settings import decode
from data.prepare.dataset import PrepareConfig, prepare
from model.ops.checks import cpu_name
from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.run import Run
from trainer.runtime import open_runtime

Row = dict[str, Any]
K = TypeVar("K")
R = TypeVar("R")


def benchmark(title: str) -> Callable[[Callable[[Any], dict[str, Any]]], Callable[..., None]]:
    """Turn a measurement, which takes the options as attributes and returns its figures, into what a script runs.

    The figures' "rows" are printed under the title, which may name options. All are written to bench.json in the folder
    `out`, with the command, its options and the machine.
    """

    def wrap(measure: Callable[[Any], dict[str, Any]]) -> Callable[..., None]:
        @functools.wraps(measure)
        def run(**options: Any) -> None:
            path = make_directory(options["out"], "out") / "bench.json"
            found = measure(SimpleNamespace(**options))
            print_table(title.format_map(options), found["rows"])
            about = {"command": command_line(), "options": to_jsonable_python(options), "machine": machine()}
            write_json(path, about | found)
            say(f"written to {path}")

        return run

    return wrap


def command_line() -> str:
    """The command that runs, as a shell takes it."""
    return shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def in_turn(runs: Mapping[K, Callable[[], R]], rounds: int, warm_up: int = 0) -> dict[K, list[R]]:
    """Call every run once per round, in random order, so that other load on the machine slows all of them alike.

    Returns what each run returned in each round, without the first `warm_up` rounds.
    """
    results: dict[K, list[R]] = {name: [] for name in runs}
    for _ in range(warm_up + rounds):
        for name in random.sample(list(runs), len(runs)):
            results[name].append(runs[name]())
    return {name: found[warm_up:] for name, found in results.items()}


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """A function that calls `run` and returns how many seconds it took."""

    def seconds() -> float:
        started = clock()
        run()
        return clock() - started

    return seconds


def speedup(times: Iterable[float], reference: Iterable[float]) -> tuple[float, float, float]:
    """Median, minimum and maximum, over the rounds, of the reference's time divided by the contender's."""
    ratios = [theirs / own for own, theirs in zip(times, reference, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def machine() -> Row:
    """The machine and the versions that the figures depend on."""
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
    """Print rows as a table, a column for each key; the first is left-aligned, and what a row lacks is empty."""
    table = Table(title=title)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    for key in keys:
        table.add_column(key.replace("_", " "), justify="right" if table.columns else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in keys))
    show_table(table)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, ["---"] * len(columns), *rows))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value or ""


def composed(overrides: Iterable[str]) -> Row:
    """The configuration of train.py with these options; no data is read."""
    return to_dict(compose("train", ["dataset_dir=none", *overrides]))


def open_run(overrides: Iterable[str]) -> Run:
    """A run of train.py with these options."""
    config = decode(TrainConfig, composed(overrides))
    runtime = open_runtime(config.runtime)
    return Run(config, runtime, World(runtime.device))


def prepare_dataset(overrides: list[str]) -> None:
    """Run scripts/prepare_data.py with these options, in this process."""
    prepare(decode(PrepareConfig, to_dict(compose("prepare", overrides))))
