"""What this machine can do, what is wrong with it, and how long the flagship would train here.

python scripts/doctor.py                      # about a minute; kernels that were never checked take some more
python scripts/doctor.py out=doctor.json      # for a bug report: without the names of host, user and home folder
"""

from pathlib import Path

from common.command import Settings, run_script


class Options(Settings):
    out: Path | None = None
    """also write the findings and all figures to this JSON file"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.doctor.examine:examine")
