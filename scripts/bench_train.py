"""Training steps of whole models side by side: tokens per second, peak memory, and their ratios to gpt2_124m.

    python scripts/bench_train.py                     # log_gpt_125m and log_gpt_mlp_124m against gpt2_124m, T=1024
    python scripts/bench_train.py seq_len=8192 rounds=1

Every measurement runs in its own process, and the models take turns in every round: one model's leftovers
(allocator, caches) do not slow the next, and other load on the machine slows all of them. On Linux these processes give
every tensor of a MB or more its own pages, so that their peak memory is what the tensors take, without the allocator's
waste.
"""

from pathlib import Path

from pydantic import PositiveInt

from common.command import Items, Settings, run_script


class Options(Settings):
    models: Items[str] = ["log_gpt_125m", "log_gpt_mlp_124m"]
    """files of configs/model"""
    set: Items[str] = []
    """options of train.py for all models, such as model.n_layer=2"""
    seq_len: PositiveInt = 1024
    """tokens of a sequence"""
    batch: PositiveInt = 1
    """sequences of a step"""
    steps: PositiveInt = 2
    """timed steps of a measurement, after three others"""
    rounds: PositiveInt = 3
    """measurements of each model"""
    out: Path = Path("runs/bench_train")
    """folder for bench.json"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.bench.train:bench")
