"""Measure log attention beside the published formula and torch's softmax attention: error, time and memory.

    python scripts/bench_attention.py
    python scripts/bench_attention.py --device cpu --quick --out runs/bench_quick

Every implementation is first compared with the definition in float64, over ranges from ordinary to hostile: with one
less exact than the definition's own rounding allows, nothing is timed. The contenders then take turns in every round,
so that whatever else the machine does hits all alike. TRITON_INTERPRET=1 checks the triton backend on a CPU, untimed.
"""

import argparse
import shlex
import sys
from pathlib import Path

from common.command import parser_of, run_script
from common.console import say
from common.files import make_directory, write_json


def main() -> int:
    """Parse the command line and measure; 1 where an implementation is wrong or an option cannot be followed."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: shows that it works, measures nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_attention"), help="where bench.json and .png go")
    return run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    """Check, time, print and write."""
    from tools.bench.attention import bench, draw  # imports torch, which --help need not wait for

    out = make_directory(options.out, "--out")
    command = shlex.join(["python", "scripts/bench_attention.py", *sys.argv[1:]])
    found = {"command": command, **bench(options.device, options.quick)}
    write_json(out / "bench.json", found)
    draw(found["rows"], found["machine"], out / "bench.png")
    say(f"written: {out / 'bench.json'}, {out / 'bench.png'}")


if __name__ == "__main__":
    sys.exit(main())
