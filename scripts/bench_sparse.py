"""Measure sparse attention beside dense causal attention by torch's fused kernel: forward and backward, by length.

    python scripts/bench_sparse.py
    python scripts/bench_sparse.py lengths=1024,4096 heads=8 rounds=1 out=runs/bench_short

Float32, one text. Every contender is first compared with its definition, at a length where that fits into memory; one
that is wrong is not timed. They then take turns in every round, so that whatever else the machine does slows all of
them. The ratio of a round is the dense form's time over the contender's; its median is reported with its range.
"""

from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from common.command import Items, Settings, run_script


class Options(Settings):
    lengths: Items[PositiveInt] = [1024, 4096, 16384]
    """lengths in tokens"""
    heads: PositiveInt = 12
    """attention heads"""
    rounds: PositiveInt = 3
    """measurements of each contender"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto, cpu or cuda; auto is a GPU if there is one"""
    out: Path = Path("runs/bench_sparse")
    """folder for bench.json"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.bench.sparse:bench")
