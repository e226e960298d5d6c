"""Recompute and check all counts and checksums of a dataset.

    python scripts/verify_dataset.py dataset_dir=datasets/pile

Prints a line for each damaged file, with its first problem, and exits with 1 if there is one.
"""

import time
from pathlib import Path

from pydantic import PositiveInt

from common.command import Settings, run_script
from common.console import print_error, say
from data.prepare.verify import n_bytes, verify
from data.shards import parse_manifest


class Options(Settings):
    dataset_dir: Path
    """what scripts/prepare_data.py made"""
    threads: PositiveInt | None = None
    """shards read at a time; null: one for every CPU"""


def run(options: Options) -> int:
    """Verify, report, and return 1 if something is wrong."""
    started = time.monotonic()
    for problem in (problems := verify(options.dataset_dir, options.threads)):
        print_error(problem)
    if problems:
        return 1
    manifest, seconds = parse_manifest(options.dataset_dir), time.monotonic() - started
    totals, megabytes = [split.total for split in manifest.splits.values()], n_bytes(manifest) / 1e6
    say(
        f"{options.dataset_dir} is whole: {sum(total.documents for total in totals):,} documents, "
        f"{sum(total.tokens for total in totals):,} tokens, {len(manifest.set_names)} sets, "
        f"{len(manifest.inputs):,} inputs; {megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / seconds:,.0f} MB/s"
    )
    return 0


if __name__ == "__main__":
    run_script(__doc__, Options, run, when_interrupted="interrupted: the dataset is not verified")
