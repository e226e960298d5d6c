"""Compile the kernels of log attention for GPUs that need not be here, and say what of a GPU they take.

python scripts/inspect_kernels.py                  # types and head sizes side by side, for compute capability 9.0
python scripts/inspect_kernels.py --capability 80 --dtype bfloat16 --head-dim 32
"""

import argparse
import sys
from importlib.util import find_spec

from common.command import parser_of, run_script
from common.settings import UserError

TYPES = ["bfloat16", "float16", "float32", "float64"]


def main() -> int:
    """Parse the command line and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--capability", type=int, default=90, help="compute capability, times ten")
    parser.add_argument("--dtype", nargs="+", default=TYPES, choices=TYPES)
    parser.add_argument("--head-dim", nargs="+", type=int, default=[32, 64, 128])
    return run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    """Compile, and print the table."""
    if find_spec("triton") is None:
        raise UserError("the package triton is not installed: pip install triton")
    from tools.bench.kernels import inspect  # imports torch and triton, which --help need not wait for

    inspect(options.dtype, options.head_dim, options.capability)


if __name__ == "__main__":
    sys.exit(main())
