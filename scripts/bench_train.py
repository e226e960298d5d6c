"""Training steps of whole models side by side: tokens per second, peak memory, and their ratios to gpt2_124m.

    python scripts/bench_train.py                     # log_gpt_125m and log_gpt_mlp_124m against gpt2_124m, T=1024
    python scripts/bench_train.py --seq-len 8192 --rounds 1

Every measurement is a process of its own, the models in turn, round after round: what one leaves behind (allocator,
caches) is not charged to the next, and a noisy machine slows all alike. On Linux these processes give every tensor of a
MB or more its own pages, so that their peak memory is what the tensors take, not what the allocator's heap has lost.
"""

import argparse
import sys
from pathlib import Path

from common.command import parser_of, positive, run_script
from tools.bench.train import bench


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and measure."""
    return run_script(parser(), bench, argv)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    known = parser_of(__doc__)
    known.add_argument(
        "--models", nargs="+", default=["log_gpt_125m", "log_gpt_mlp_124m"], help="files of configs/model"
    )
    known.add_argument("--set", nargs="*", default=[], help="options for all of them: model.n_layer=2")
    known.add_argument("--seq-len", type=positive, default=1024)
    known.add_argument("--batch", type=positive, default=1, help="sequences of a step")
    known.add_argument("--steps", type=positive, default=2, help="timed steps of a measurement, after one that is not")
    known.add_argument("--rounds", type=positive, default=3)
    known.add_argument("--out", type=Path, default=Path("runs/bench_train"))
    return known


if __name__ == "__main__":
    sys.exit(main())
