"""Check, time and test a GPU within a time limit: doctor.py, bench.py for training, operators and decoding, GPU tests.

    make gpu-hour
    python scripts/gpu_hour.py minutes=9 out=found       # on a bare machine, without make

Each stage is a process, and what it finds is written into `out` before the next begins. The same command goes on where
it was cut off. A stage that has an outcome, good or bad, is not run again: delete its entry in report.json for that.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

NEEDED = "torch hydra matplotlib numpy omegaconf orjson pydantic rich safetensors tiktoken yaml hypothesis pytest"
if missing := [name for name in NEEDED.split() if find_spec(name) is None]:
    sys.exit(f"error: {sys.executable} lacks {', '.join(missing)}: install what pyproject.toml names")

from pydantic import PositiveFloat  # noqa: E402

from common.command import Settings, run_script  # noqa: E402


class Options(Settings):
    minutes: PositiveFloat = 60.0
    """time limit of all stages together"""
    out: Path = Path("runs/gpu_hour")
    """folder for the report and for what the stages write"""


if __name__ == "__main__":
    message = "interrupted; run the same command again to go on"
    run_script(__doc__, Options, "tools.bench.gpu_hour:run", when_interrupted=message)
