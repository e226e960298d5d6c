"""Time the kernels of log attention with other numbers of warps, stages and registers than those that they use.

    python scripts/bench_launches.py
    python scripts/bench_launches.py head_dim=64 gates=head tokens=4096

Rows are printed as soon as they are measured; the first of each kind has the settings in use.
"""

from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from common.command import Items, Settings, run_script


class Options(Settings):
    head_dim: Items[PositiveInt] = [32, 64, 128]
    """sizes of a head; all heads together have 768 features"""
    gates: Items[Literal["none", "head", "feature"]] = ["none"]
    """without gates, with one for a head or with one for each feature"""
    warps: Items[PositiveInt] = [4, 8]
    """warps of a program"""
    stages: Items[PositiveInt] = [1, 2, 3]
    """chunks that are loaded at a time"""
    registers: Items[PositiveInt] = [128, 168, 255]
    """most registers of a thread"""
    batch: PositiveInt = 16
    """sequences"""
    tokens: PositiveInt = 1024
    """tokens of a sequence"""
    out: Path = Path("runs/bench_launches")
    """folder for bench.json"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.bench.launches:bench")
