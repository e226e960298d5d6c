"""Share key and value heads of a trained model: python scripts/convert_gqa.py runs/gpt2 runs/gpt2-gqa --n-kv-head 4.

Makes a run of its own whose checkpoint of step 0 holds the model with fewer key and value heads, each the mean of a
group's (Ainslie et al. 2023, section 2.1). Where the heads of a group were equal, it is the same model. All else starts
anew: step, schedule, optimizer. The run goes on, some per cent of the first one's steps, by train.py with the settings
of the first run and those that are printed at the end.
"""

import argparse
import sys
from pathlib import Path

from common.command import parser_of, run_script


def main() -> int:
    """Parse the command line and convert; what a user can mend is one line on standard error."""
    parser = parser_of(__doc__)
    parser.add_argument("checkpoint", type=Path, help="a run directory, or one of its checkpoints")
    parser.add_argument("run_dir", type=Path, help="the run to make; it must not hold one")
    parser.add_argument("--n-kv-head", type=int, required=True, help="heads of keys and values, 1 for all to share one")
    parser.add_argument(
        "--seed", type=int, help="of the new run's data order; default: the first run's, as are its data"
    )
    return run_script(parser, run)


def run(args: argparse.Namespace) -> None:
    """Convert."""
    from tools.convert.gqa import convert  # imports torch, which --help need not wait for

    convert(args.checkpoint, args.run_dir, args.n_kv_head, args.seed)


if __name__ == "__main__":
    sys.exit(main())
