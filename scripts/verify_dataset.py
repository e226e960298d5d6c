"""Recompute and check all counts and checksums of a dataset.

    python scripts/verify_dataset.py dataset_dir=datasets/pile

Prints a line for each damaged file, with its first problem, and exits with 1 if there is one.
"""

import time
from pathlib import Path

from pydantic import PositiveInt

from common.command import run_script
from common.console import print_error, say
from common.settings import Settings
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
    problems = verify(options.dataset_dir, options.threads)
    if problems:
        for problem in problems:
            print_error(problem)
        return 1
    manifest = parse_manifest(options.dataset_dir)
    totals = [split.total for split in manifest.splits.values()]
    documents, tokens = sum(total.documents for total in totals), sum(total.tokens for total in totals)
    megabytes, seconds = n_bytes(manifest) / 1e6, time.monotonic() - started
    say(
        f"{options.dataset_dir} is whole: {documents:,} documents, {tokens:,} tokens, "
        f"{len(manifest.set_names)} sets, {len(manifest.inputs):,} inputs; "
        f"{megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / seconds:,.0f} MB/s"
    )
    return 0


if __name__ == "__main__":
    run_script(__doc__, Options, run, when_interrupted="interrupted: the dataset is not verified")
