"""Compare log_recurrence with the published form: errors in float32 over length, and time at 1,024 tokens.

    python scripts/bench_recurrence.py                # 1,024 to 1,048,576 tokens
    python scripts/bench_recurrence.py --logit 10     # p = 0.99995: a memory of some 20,000 tokens

The truth is log_recurrence in float64, which tests hold to the definition.
"""

import argparse
import sys
from pathlib import Path

from common.command import parser_of, positive, run_script
from common.console import say
from common.files import make_directory, write_json


def main() -> int:
    """Parse the command line and measure."""
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", nargs="+", type=positive, default=[2**10, 2**14, 2**17, 2**20], help="tokens")
    parser.add_argument("--logit", type=float, default=0.0, help="mean of p's logits; the larger, the longer it keeps")
    parser.add_argument("--rounds", type=positive, default=200, help="timed runs of each form")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_recurrence"))
    return run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    """Measure and print, write bench.json."""
    from tools.bench.recurrence import bench  # imports torch, which --help need not wait for

    out = make_directory(options.out, "--out")
    found = bench(options.lengths, options.logit, options.rounds)
    write_json(out / "bench.json", {"options": {k: str(v) for k, v in vars(options).items()}, **found})
    say(f"written to {out / 'bench.json'}")


if __name__ == "__main__":
    sys.exit(main())
