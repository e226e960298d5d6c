"""From compressed text to verified shards: the rate beside tiktoken's own in one thread, and the memory it takes.

    python scripts/bench_data.py --files 'pile/*.jsonl.zst' --ranks gpt2.tiktoken --workers 2

Each round encodes the documents with tiktoken's encode_ordinary in one thread of one process, which has them in memory,
and then runs scripts/prepare_data.py and scripts/verify_dataset.py as anyone would: starting Python, decompressing,
parsing, hashing, writing and verifying count. Medians are of the rounds. Memory is the largest sum of the resident sets
of the command and all its processes, read every 20 ms: pages that they share are counted for each of them.
"""

import argparse
import os
import sys
from pathlib import Path

from common.command import parser_of, run_script
from tools.bench.data import bench


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and measure."""
    return run_script(parser(), bench, argv)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    known = parser_of(__doc__)
    known.add_argument("--files", nargs="+", required=True, help="globs of .jsonl, .jsonl.gz or .jsonl.zst files")
    known.add_argument("--text-field", default="text")
    known.add_argument("--ranks", type=Path, help="GPT-2's rank file; without one tiktoken downloads it")
    known.add_argument("--workers", type=int, default=os.cpu_count())
    known.add_argument("--rounds", type=int, default=3)
    known.add_argument("--out", type=Path, default=Path("runs/bench_data"))
    return known


if __name__ == "__main__":
    sys.exit(main())
