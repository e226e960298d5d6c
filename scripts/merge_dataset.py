"""Join the parts that tasks prepared: python scripts/merge_dataset.py datasets/pile-parts datasets/pile.

The parts are what scripts/prepare_data.py left in its out_dir with num_tasks. The result is the dataset, to the byte,
that one machine makes without num_tasks. The parts stay; delete them when you have verified it.
"""

import argparse
import sys
from pathlib import Path

from common.command import parser_of, run_script
from data.prepare.merge import merge


def main() -> int:
    """Parse the command line and merge; what a user can mend is one line on standard error."""
    parser = parser_of(__doc__)
    parser.add_argument("parts_dir", type=Path, help="the out_dir of the tasks: it holds task-00000-of-... and so on")
    parser.add_argument("out_dir", type=Path, help="the dataset directory to make")
    return run_script(parser, run, when_interrupted="interrupted; the same command starts the merge again")


def run(args: argparse.Namespace) -> None:
    """Merge."""
    merge(args.parts_dir, args.out_dir)


if __name__ == "__main__":
    sys.exit(main())
