"""Compare runs: one page (report.html, which opens anywhere and needs no network) and pictures of them.

python scripts/report.py runs/sweep                          # all runs of a sweep, or of any folder
python scripts/report.py runs/demo runs/pile --out compared  # some runs; the report goes into compared/
"""

import argparse
import sys
from pathlib import Path

from common.command import parser_of, run_script
from common.console import say


def main() -> int:
    """Parse the command line and report."""
    parser = parser_of(__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="of a run, of a sweep, or of many runs")
    parser.add_argument("--out", type=Path, help="folder of the report; default: the one that all runs are in")
    return run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    """Read the runs, write the report, say where it is."""
    from tools.report.write import write_report  # here, because matplotlib takes its time

    for path in write_report(options.folders, options.out):
        say(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())
