"""Count and sum everything in a dataset again: python scripts/verify_dataset.py datasets/pile.

Prints a line for every problem, with the file's name, and exits with 1 if there is one.
"""

import argparse
import sys
import time
from pathlib import Path

from common.command import parser_of, positive, run_script
from common.console import errors, say
from data.prepare.verify import n_bytes, verify
from data.shards import parse_manifest


def main() -> int:
    """Parse the command line and verify."""
    parser = parser_of(__doc__)
    parser.add_argument("dataset_dir", type=Path, help="what scripts/prepare_data.py made")
    parser.add_argument("--threads", type=positive, help="that read shards at a time; default: one for every CPU")
    return run_script(parser, run, when_interrupted="interrupted: nothing is known of the dataset")


def run(arguments: argparse.Namespace) -> int:
    """Verify, and say what was found; 1 where something is wrong."""
    started = time.monotonic()
    problems = verify(arguments.dataset_dir, arguments.threads)
    if problems:
        for problem in problems:
            errors.print(f"error: {problem}", markup=False, style="red")
        return 1
    manifest = parse_manifest(arguments.dataset_dir)
    totals = [split.total for split in manifest.splits.values()]
    documents, tokens = sum(total.documents for total in totals), sum(total.tokens for total in totals)
    megabytes, seconds = n_bytes(manifest) / 1e6, time.monotonic() - started
    say(
        f"{arguments.dataset_dir} is whole: {documents:,} documents, {tokens:,} tokens, "
        f"{len(manifest.set_names)} sets, {len(manifest.inputs):,} inputs; "
        f"{megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / seconds:,.0f} MB/s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
