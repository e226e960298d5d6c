"""Run known benchmarks.

python scripts/lm_eval.py checkpoint=runs/demo tasks=lambada_openai,hellaswag
"""

import sys
from pathlib import Path

# This file has the name of the library that it runs, which must be found instead.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

from cli import command  # noqa: E402

if __name__ == "__main__":
    command(
        "lm_eval",
        "inference.harness:run_harness",
        "inference.harness:HarnessConfig",
        text_keys=("tasks",),
    )
