"""Measure log attention beside the published formula and torch's softmax attention: error, time and memory.

    python scripts/bench_attention.py
    python scripts/bench_attention.py device=cpu quick=true out=runs/bench_quick

Every implementation is first compared with the definition in float64, over ranges from ordinary to hostile: if one is
less exact than the definition's own rounding allows, nothing is timed. The contenders then take turns in every round,
so that whatever else the machine does slows all of them. TRITON_INTERPRET=1 checks the triton backend on a CPU without
timing it.
"""

from pathlib import Path
from typing import Literal

from common.command import Settings, run_script


class Options(Settings):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto, cpu or cuda; auto is a GPU if there is one"""
    quick: bool = False
    """true: tiny shapes, which show that it works and measure nothing"""
    out: Path = Path("runs/bench_attention")
    """folder for bench.json and bench.png"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.bench.attention:bench")
