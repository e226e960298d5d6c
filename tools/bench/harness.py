"""What all benchmarks share: taking turns, ratios, the machine, one kind of table, and bench.json."""

import os
import platform
import random
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.table import Table

from common.commit import git_commit
from common.console import say
from common.files import write_json
from common.settings import Settings

if TYPE_CHECKING:
    from trainer.run import Run

Row = dict[str, Any]
K = TypeVar("K")
R = TypeVar("R")


def in_turn(runs: Mapping[K, Callable[[], R]], rounds: int, warm_up: int = 0) -> dict[K, list[R]]:
    """Call every run once per round, in random order, so that other load on the machine slows all of them alike.

    Returns what each run returned in each round, without the first `warm_up` rounds.
    """
    results: dict[K, list[R]] = {name: [] for name in runs}
    for n in range(warm_up + rounds):
        for name in random.sample(list(runs), len(runs)):
            result = runs[name]()
            if n >= warm_up:
                results[name].append(result)
    return results


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
    """What the figures depend on besides the command."""
    import torch  # here, because --help need not wait for it

    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    return {
        "cpu": cpu[1] if cpu else platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "git_commit": git_commit(),
    }


def table_of(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table whose first column is left-aligned. A row with a single cell is the heading of a section."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right" if table.columns else "left")
    for cells in map(list, rows):
        if len(cells) == 1:
            table.add_section()
        table.add_row(*cells)
    return table


def write_results(out: Path, options: Settings, found: Row) -> None:
    """Write bench.json: the command, its options, the machine, and what was found."""
    command = shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    about = {"command": command, "options": options.model_dump(mode="json"), "machine": machine()}
    write_json(out / "bench.json", about | found)
    say(f"written to {out / 'bench.json'}")


def open_run(overrides: list[str], mixture: Mapping[str, float] | None = None) -> "Run":
    """A run of train.py with these options."""
    from cli import compose, to_dict
    from common.settings import decode
    from trainer.config import TrainConfig
    from trainer.distributed import World
    from trainer.run import Run
    from trainer.runtime import open_runtime

    composed = to_dict(compose("train", overrides))
    composed["data"]["mixture"] = mixture
    config = decode(TrainConfig, composed)
    runtime = open_runtime(config.runtime)
    return Run(config, runtime, World(runtime.device))


def prepare_dataset(overrides: list[str]) -> None:
    """Run scripts/prepare_data.py with these options, in this process."""
    from cli import compose, to_dict
    from common.settings import decode
    from data.prepare.dataset import PrepareConfig, prepare

    prepare(decode(PrepareConfig, to_dict(compose("prepare", overrides))))
