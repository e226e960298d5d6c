"""Count and sum everything in a dataset again: python scripts/verify_dataset.py datasets/pile.

Prints a line for every problem, with the file's name, and exits with 1 if there is one.
"""

import argparse
import sys
import time
from pathlib import Path

from common.console import errors, say
from data.shards import parse_manifest
from data.verify import n_bytes, verify


def main() -> None:
    """Verify, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset_dir", type=Path, help="what scripts/prepare_data.py made")
    parser.add_argument("--threads", type=int, help="that read shards at the same time; default: one for every CPU")
    arguments = parser.parse_args()
    if arguments.threads is not None and arguments.threads < 1:
        parser.error(f"--threads {arguments.threads}: give 1 or more")
    started = time.monotonic()
    try:
        problems = verify(arguments.dataset_dir, arguments.threads)
    except KeyboardInterrupt:
        problems = [f"interrupted: nothing is known of {arguments.dataset_dir}"]
    if problems:
        for problem in problems:
            errors.print(f"error: {problem}", markup=False, style="red")
        sys.exit(1)
    manifest = parse_manifest(arguments.dataset_dir)
    totals = [split.total for split in manifest.splits.values()]
    documents, tokens = sum(total.documents for total in totals), sum(total.tokens for total in totals)
    megabytes, seconds = n_bytes(manifest) / 1e6, time.monotonic() - started
    say(
        f"{arguments.dataset_dir} is whole: {documents:,} documents, {tokens:,} tokens, "
        f"{len(manifest.set_names)} sets, {len(manifest.inputs):,} inputs; "
        f"{megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / seconds:,.0f} MB/s"
    )


if __name__ == "__main__":
    main()
