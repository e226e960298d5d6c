"""Known benchmarks: python scripts/lm_eval.py checkpoint=runs/demo tasks=lambada_openai,hellaswag."""

import sys
from pathlib import Path
from typing import Any

# This file has the name of the library that it runs, which must be found instead.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

from cli import command  # noqa: E402


def run(config: dict[str, Any]) -> None:
    """Decode the configuration and run the tasks."""
    from common.settings import decode
    from inference.harness import HarnessConfig, run_harness

    run_harness(decode(HarnessConfig, config))


if __name__ == "__main__":
    command("lm_eval", run, text_keys=("tasks",))
