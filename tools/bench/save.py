"""How long saving a checkpoint holds up training."""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from cli import compose, to_dict
from common.console import console, say
from common.files import make_directory, write_json
from common.settings import decode
from data.prepare.dataset import PrepareConfig, prepare

INTERVAL = 1000
"""checkpoint.every, as it comes."""


def bench(options: argparse.Namespace) -> None:
    """Measure, print a table, write bench.json."""
    out = make_directory(options.out, "--out")
    dataset_dir = out / "dataset"
    if not dataset_dir.exists():
        corpus = ["data=stdlib", "tokenizer=bytes", f"out_dir={dataset_dir}"]
        prepare(decode(PrepareConfig, to_dict(compose("prepare", corpus))))
    figures = {" ".join(run.split(",")): measure(run.split(","), dataset_dir, out, options) for run in options.runs}
    console.print(table(figures))
    write_json(out / "bench.json", {"options": {k: str(v) for k, v in vars(options).items()}, "figures": figures})
    say(f"written to {out / 'bench.json'}")


def measure(overrides: list[str], dataset_dir: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of steps and of saves, medians, and checkpoint bytes; of one run."""
    from trainer.config import TrainConfig
    from trainer.distributed import World
    from trainer.run import Run
    from trainer.runtime import open_runtime

    run_dir = Path(tempfile.mkdtemp(dir=out))
    paths = [f"dataset_dir={dataset_dir}", f"run_dir={run_dir}", "resume=auto", "schedule.warmup_steps=1"]
    config = decode(TrainConfig, to_dict(compose("train", [*overrides, *paths, f"max_steps={options.steps}"])))
    runtime = open_runtime(config.runtime)
    run = Run(config, runtime, World(runtime.device))
    held: list[float] = []
    beside: list[float] = []
    alone: list[float] = []
    with run.open_files(), run.reading_ahead():
        while not run.ended:
            writing = run.saver.writing
            started = time.perf_counter()
            run.train_step()
            (beside if writing else alone).append(time.perf_counter() - started)
            if run.step % options.every == 0:
                run.saver.wait()  # at the default interval the last one is done long since
                started = time.perf_counter()
                run.save()
                held.append(time.perf_counter() - started)
    size = sum(file.stat().st_size for file in (run_dir / "checkpoints").glob("*/*")) / 2  # it keeps two
    shutil.rmtree(run_dir)
    step, slowed = statistics.median(alone[1:]), statistics.median(beside) if beside else None
    return {
        "bytes": size,
        "step_seconds": step,
        "held_up_seconds": statistics.median(held[1:]),
        "held_up_of_a_step": statistics.median(held[1:]) / step,
        "held_up_of_the_interval": statistics.median(held[1:]) / (INTERVAL * step),
        "step_while_writing_seconds": slowed,
    }


def table(figures: dict[str, dict[str, Any]]) -> Table:
    """The figures, a row for each run."""
    result = Table("run", "checkpoint", "step", "held up", "of a step", f"of {INTERVAL} steps", "step while writing")
    for name, row in figures.items():
        slowed = row["step_while_writing_seconds"]
        result.add_row(
            name,
            f"{row['bytes'] / 1e6:,.0f} MB",
            f"{1e3 * row['step_seconds']:,.1f} ms",
            f"{1e3 * row['held_up_seconds']:,.1f} ms",
            f"{row['held_up_of_a_step']:.1%}",
            f"{row['held_up_of_the_interval']:.3%}",
            "none was" if slowed is None else f"{slowed / row['step_seconds']:.2f} x",
        )
    return result
