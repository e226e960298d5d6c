"""How long saving a checkpoint holds up training."""

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tools.bench.harness import Row, benchmark, open_run, prepare_dataset, print_table, timed

INTERVAL = 1000
"""The default of checkpoint.every."""


@benchmark
def bench(options: Any) -> Row:
    """Measure and print a table."""
    dataset_dir = options.out / "dataset"
    if not dataset_dir.exists():
        prepare_dataset(["data=stdlib", "tokenizer=bytes", f"out_dir={dataset_dir}"])
    figures = {" ".join(run.split(",")): measure(run.split(","), dataset_dir, options) for run in options.runs}
    cells = []
    for name, row in figures.items():
        slowed = row["step_while_writing_seconds"]
        cells.append([name, f"{row['bytes'] / 1e6:,.0f} MB"])
        cells[-1] += [f"{1e3 * row[f'{key}_seconds']:,.1f} ms" for key in ("step", "held_up")]
        cells[-1] += [f"{row['held_up_of_a_step']:.1%}", f"{row['held_up_of_the_interval']:.3%}"]
        cells[-1].append("none was" if slowed is None else f"{slowed / row['step_seconds']:.2f} x")
    columns = ["run", "checkpoint", "step", "held up", "of a step", f"of {INTERVAL} steps", "step while writing"]
    print_table("checkpoints beside training", columns, cells)
    return {"figures": figures}


def measure(overrides: list[str], dataset_dir: Path, options: Any) -> Row:
    """Median seconds of steps and of saves, and bytes of a checkpoint, in one run."""
    run_dir = Path(tempfile.mkdtemp(dir=options.out))
    paths = [f"dataset_dir={dataset_dir}", f"run_dir={run_dir}", "resume=auto"]
    run = open_run([*overrides, *paths, "schedule.warmup_steps=1", f"max_steps={options.steps}"])
    held: list[float] = []
    steps: dict[bool, list[float]] = {True: [], False: []}  # by whether a checkpoint is being written meanwhile
    with run.open_files(), run.reading_ahead():
        while not run.ended:
            steps[run.saver.writing].append(timed(run.train_step)())
            if run.step % options.every == 0:
                run.saver.wait()  # at the default interval the last one is done long before
                held.append(timed(run.save)())
    size = sum(file.stat().st_size for file in (run_dir / "checkpoints").glob("*/*")) / 2  # it keeps two
    shutil.rmtree(run_dir)
    step, held_up = statistics.median(steps[False][1:]), statistics.median(held[1:])
    return {
        "bytes": size,
        "step_seconds": step,
        "held_up_seconds": held_up,
        "held_up_of_a_step": held_up / step,
        "held_up_of_the_interval": held_up / (INTERVAL * step),
        "step_while_writing_seconds": statistics.median(steps[True]) if steps[True] else None,
    }
