"""Compare runs: one page (report.html, which opens anywhere and needs no network) and pictures of them.

python scripts/report.py folders=runs/sweep                          # all runs of a sweep, or of any folder
python scripts/report.py folders=runs/demo,runs/pile out=compared    # some runs; the report goes into compared/
python scripts/report.py folders=runs/sweep watch=true               # a page that follows runs under way
"""

from pathlib import Path

from common.command import Items, Settings, run_script


class Options(Settings):
    folders: Items[Path]
    """folders of a run, of a sweep, or of many runs; put brackets around each of several folders with commas:
    'folders=[runs/s/a=1,b=2],[runs/s/a=2,b=2]'"""
    out: Path | None = None
    """folder of the report; null: the one that holds all the runs"""
    watch: bool = False
    """true: keep the page up to date while runs go on; reload it in a browser once, then it reloads itself"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.report.write:write_report", when_interrupted="no longer following the runs")
