"""How fast the loader is, and how long training waits for it: alone, under a dummy model, and under a real one.

    python scripts/bench_loader.py                                  # random ids of 22 sets, made for it
    python scripts/bench_loader.py --dataset-dir datasets/pile --mixture '{"Pile-CC": 2}'

The dummy model takes --rate tokens per second, launching small operations all the while, as the CPU beside a GPU does.
The real one takes steps of train.py. Waiting is measured from the third step on: nothing is read ahead of the first.
"""

import argparse
import json
import sys
from pathlib import Path

from common.command import parser_of, positive, run_script
from tools.bench.loader import MODEL, bench


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and measure."""
    return run_script(parser(), bench, argv)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    known = parser_of(__doc__)
    known.add_argument("--dataset-dir", type=Path, help="default: one of random ids")
    known.add_argument("--tokens", type=positive, default=200_000_000, help="of the random dataset")
    known.add_argument("--mixture", type=json.loads, help='weights of sets: {"Pile-CC": 2}')
    known.add_argument("--seq-len", type=positive, default=1024)
    known.add_argument("--batch-tokens", type=positive, default=491_520)
    known.add_argument("--seconds", type=float, default=10, help="length of the first two measurements")
    known.add_argument("--rate", type=float, default=2e6, help="tokens per second of the dummy model")
    known.add_argument("--model", default="log_gpt_125m", help="a file of configs/model")
    known.add_argument("--model-steps", type=int, default=5, help="timed steps of it; 0: none")
    known.add_argument(
        "--set", nargs="*", default=MODEL, help=f"options of train.py for it; default: {' '.join(MODEL)}"
    )
    known.add_argument("--out", type=Path, default=Path("runs/bench_loader"))
    return known


if __name__ == "__main__":
    sys.exit(main())
