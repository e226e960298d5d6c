"""How long saving a checkpoint holds up training."""

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common.command import options_of
from data.shards import MANIFEST
from tools.bench.harness import Row, benchmark, open_run, prepare_dataset, timed


@benchmark("checkpoints beside training: medians, without the first of each run")
def bench(options: Any) -> Row:
    """Measure each run."""
    dataset_dir = options.out / "dataset"
    if not (dataset_dir / MANIFEST).is_file():
        prepare_dataset(["data=stdlib", "tokenizer=bytes", *options_of({"out_dir": str(dataset_dir)})])
    return {"rows": [measure(run.split(","), dataset_dir, options) for run in options.runs]}


def measure(overrides: list[str], dataset_dir: Path, options: Any) -> Row:
    """Medians of steps and of saves, and the size of a checkpoint, in one run that saves four times or more."""
    run_dir = Path(tempfile.mkdtemp(dir=options.out))
    paths = options_of({"dataset_dir": str(dataset_dir), "run_dir": str(run_dir)})
    run = open_run([*overrides, *paths, "resume=auto", "schedule.warmup_steps=1", f"max_steps={options.steps}"])
    held: list[float] = []
    steps: dict[bool, list[float]] = {True: [], False: []}  # by whether a checkpoint is being written meanwhile
    with run.open_files(), run.reading_ahead():
        while not run.ended:
            steps[run.saver.writing].append(timed(run.train_step)())
            if run.step % (options.steps // 4) == 0:
                run.saver.wait()  # at the default interval the last one is done long before
                held.append(timed(run.save)())
    size = sum(file.stat().st_size for file in (run_dir / "checkpoints").glob("*/*")) / 2  # it keeps two
    shutil.rmtree(run_dir)
    step, held_up = statistics.median(steps[False][1:]), statistics.median(held[1:])
    return {
        "run": " ".join(overrides),
        "megabytes": size / 1e6,
        "step_ms": 1e3 * step,
        "held_up_ms": 1e3 * held_up,
        "held_up_of_a_step": held_up / step,
        "held_up_of_1000_steps": held_up / (1000 * step),
        "x_step_while_writing": statistics.median(steps[True]) / step if steps[True] else None,
    }
