"""How fast the loader is, and how long training waits for it: alone, under a dummy model, and under a real one.

    python scripts/bench_loader.py                                  # random ids, made for it
    python scripts/bench_loader.py dataset_dir=datasets/pile

The dummy model consumes `rate` tokens per second and launches small operations all the while, as the CPU beside a GPU
does. The real one takes steps of train.py. Waiting is measured from the third step on: nothing is prefetched for the
first.
"""

from pathlib import Path

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from common.command import Items, Settings, run_script


class Options(Settings):
    dataset_dir: Path | None = None
    """a dataset; null: one of random ids"""
    tokens: PositiveInt = 200_000_000
    """size of the random dataset"""
    seq_len: PositiveInt = 1024
    """tokens of a sequence"""
    batch_tokens: PositiveInt = 491_520
    """tokens of a step"""
    seconds: PositiveFloat = 10.0
    """length of each of the first two measurements"""
    rate: PositiveFloat = 2e6
    """tokens per second of the dummy model"""
    model: str = "heinsen_125m"
    """a file of configs/model: the real model"""
    model_steps: NonNegativeInt = 5
    """timed steps of the real model; 0: none"""
    set: Items[str] = ["seq_len=256", "batch_tokens=1024", "runtime.micro_batch=4"]
    """options of train.py for the real model"""
    out: Path = Path("runs/bench_loader")
    """folder for bench.json"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.bench.loader:bench")
