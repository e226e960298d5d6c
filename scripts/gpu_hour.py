"""Check, time and test a GPU: python scripts/gpu_hour.py minutes=9 out=found."""

import sys
from importlib.util import find_spec
from pathlib import Path

NEEDED = "torch hydra matplotlib numpy omegaconf orjson pydantic rich safetensors tiktoken yaml hypothesis pytest xdist"
if missing := [name for name in NEEDED.split() if find_spec(name) is None]:
    sys.exit(
        f"error: {sys.executable} lacks {', '.join(missing)}: see docs/kernels.md, or run make setup"
    )
sys.path.append(str(Path(__file__).resolve().parents[1]))  # nothing is installed on a bare machine

from cli import command  # noqa: E402

if __name__ == "__main__":
    message = "interrupted; the same command continues"
    command("gpu_hour", "tools.bench.gpu_hour:run", when_interrupted=message)
