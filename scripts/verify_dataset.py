"""Recompute and check all counts and checksums of a dataset.

    python scripts/verify_dataset.py dataset_dir=datasets/pile

Prints a line for each damaged file, with its first problem, and exits with 1 if there is one.
"""

from pathlib import Path

from pydantic import PositiveInt

from common.command import Settings, run_script


class Options(Settings):
    dataset_dir: Path
    """what scripts/prepare_data.py made"""
    threads: PositiveInt | None = None
    """shards read at a time; null: one for every CPU"""


if __name__ == "__main__":
    run_script(
        __doc__,
        Options,
        "data.prepare.verify:verify_or_exit",
        when_interrupted="interrupted: the dataset is not verified",
    )
