"""Measure sparse attention beside dense causal attention by torch's fused kernel: forward and backward, by length.

    python scripts/bench_sparse.py
    python scripts/bench_sparse.py --lengths 1024 4096 --heads 8 --rounds 1 --out runs/bench_short

Float32 on the CPU, one text. Every contender is first compared with its definition, at a length where that fits into
memory; one that is wrong is not timed. They then take turns in every round, so that whatever else the machine does hits
all alike. The ratio of a round is the dense form's time over the contender's; its median is reported with its range.
"""

import argparse
import shlex
import sys
from pathlib import Path

from common.command import parser_of, positive, run_script
from common.console import console, say
from common.files import make_directory, write_json


def main() -> int:
    """Parse the command line and measure."""
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=positive, nargs="+", default=[1024, 4096, 16384], help="tokens")
    parser.add_argument("--heads", type=positive, default=12)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/bench_sparse"), help="folder for bench.json")
    return run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    """Check, time, print and write."""
    # here, because --help need not wait for torch
    from tools.bench.sparse import check, describe, measure, table_of

    check(options.heads)
    out = make_directory(options.out, "--out")
    rows = [row for T in options.lengths for row in measure(T, options.heads, options.rounds)]
    command = shlex.join(["python", "scripts/bench_sparse.py", *sys.argv[1:]])
    write_json(out / "bench.json", {"command": command, "machine": describe(), "rows": rows})
    console.print(table_of(rows))
    say(f"wrote {out / 'bench.json'}")


if __name__ == "__main__":
    sys.exit(main())
