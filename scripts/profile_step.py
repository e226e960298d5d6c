"""Profile training steps: which kernels take the time, and how often the CPU waits for the GPU.

    python scripts/profile_step.py                       # heinsen_125m, 16 x 1,024 tokens
    python scripts/profile_step.py model=softmax_1m batch=2 seq_len=64 set=runtime.compile=false

Times are those of a kernel itself, a step. trace.json opens in https://ui.perfetto.dev.
"""

from pathlib import Path

from pydantic import PositiveInt

from common.command import Items, Settings, run_script


class Options(Settings):
    model: str = "heinsen_125m"
    """a file of configs/model"""
    set: Items[str] = []
    """options of train.py, such as runtime.compile=false"""
    seq_len: PositiveInt = 1024
    """tokens of a sequence"""
    batch: PositiveInt = 16
    """sequences of a step"""
    steps: PositiveInt = 3
    """profiled steps, after two others"""
    out: Path = Path("runs/profile_step")
    """folder for bench.json and trace.json"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.bench.profile:bench")
