"""What saving costs training: how long a checkpoint holds the training thread up, and how far writing slows its steps.

    python scripts/bench_save.py                                                      # quickstart, log_gpt_125m
    python scripts/bench_save.py --runs experiment=quickstart --steps 200 --every 20

Runs train.py's own loop. Of each run the first save, which gets the memory for copies, is left out. Steps
in which a checkpoint is being written are compared with the others of the same run, as medians.
"""

import argparse
import sys
from pathlib import Path

from common.command import parser_of, positive, run_script
from tools.bench.save import bench


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and measure."""
    return run_script(parser(), bench, argv)


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


if __name__ == "__main__":
    sys.exit(main())
