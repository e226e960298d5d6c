"""Compare runs: one page (report.html, which opens anywhere and needs no network) and pictures of them.

python scripts/report.py folders=runs/sweep                          # all runs of a sweep, or of any folder
python scripts/report.py folders=runs/demo,runs/pile out=compared    # some runs; the report goes into compared/
"""

import sys
from pathlib import Path

from common.command import Items, run_script
from common.console import say
from common.settings import Settings


class Options(Settings):
    folders: Items[Path]
    """folders of a run, of a sweep, or of many runs"""
    out: Path | None = None
    """folder of the report; null: the one that holds all the runs"""


def run(options: Options) -> None:
    from tools.report.write import write_report  # imports matplotlib, which --help does not need

    for path in write_report(options.folders, options.out):
        say(f"written: {path}")


if __name__ == "__main__":
    sys.exit(run_script(__doc__, Options, run))
