"""What saving costs training: how long a checkpoint holds the training thread up, and how far writing slows its steps.

    python scripts/bench_save.py                                                      # quickstart, log_gpt_125m
    python scripts/bench_save.py --runs experiment=quickstart --steps 200 --every 20

Runs train.py's own loop. Of each run the first save, which gets the memory for copies, is left out. Steps
in which a checkpoint is being written are compared with the others of the same run, as medians.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from cli import compose, to_dict
from common.command import parser_of, positive, run_script
from common.console import console, say
from common.files import make_directory, write_json
from common.settings import decode
from data.prepare import PrepareConfig, prepare

INTERVAL = 1000
"""checkpoint.every, as it comes."""


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and measure."""
    return run_script(parser(), bench, argv)


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


def parser() -> argparse.ArgumentParser:
    """The command line."""
    known = parser_of(__doc__)
    small = "experiment=quickstart"
    large = "model=log_gpt_125m,seq_len=256,batch_tokens=1024,runtime.micro_batch=4"
    known.add_argument("--runs", nargs="+", default=[small, large], help="options of train.py, with commas between")
    known.add_argument("--steps", type=positive, default=24)
    known.add_argument("--every", type=positive, default=6, help="steps between checkpoints")
    known.add_argument("--out", type=Path, default=Path("runs/bench_save"))
    return known


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


if __name__ == "__main__":
    sys.exit(main())
