"""Join the parts that tasks prepared: python scripts/merge_dataset.py datasets/pile-parts datasets/pile.

The parts are those of `prepare_data.py num_tasks=N task_index=0..N-1 out_dir=datasets/pile-parts`. The result is the
dataset, to the byte, that one machine makes without num_tasks. The parts stay; delete them when you have verified it.
"""

import argparse
import sys
from pathlib import Path

from common.console import errors
from common.settings import UserError
from data.merge import merge


def main() -> None:
    """Parse the command line and merge; what a user can mend is one line on standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts_dir", type=Path, help="the out_dir of the tasks: it holds task-00000-of-... and so on")
    parser.add_argument("out_dir", type=Path, help="the dataset directory to make")
    args = parser.parse_args()
    try:
        merge(args.parts_dir, args.out_dir)
    except (UserError, OSError) as error:
        errors.print(f"error: {error}", markup=False, style="red")
        sys.exit(1)
    except KeyboardInterrupt:
        errors.print("error: interrupted; the same command goes on from what is written", style="red")
        sys.exit(130)


if __name__ == "__main__":
    main()
