"""Compare log_recurrence with the published form: errors in float32 over length, and time at 1,024 tokens.

    python scripts/bench_recurrence.py                # 1,024 to 1,048,576 tokens
    python scripts/bench_recurrence.py logit=10       # p = 0.99995: a memory of some 20,000 tokens

The reference is log_recurrence in float64, which tests compare with the definition.
"""

from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from common.command import Items, Settings, run_script


class Options(Settings):
    lengths: Items[PositiveInt] = [2**10, 2**14, 2**17, 2**20]
    """lengths in tokens"""
    logit: float = 0.0
    """mean of p's logits; the larger, the longer the memory"""
    rounds: PositiveInt = 200
    """timed runs of each form"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto, cpu or cuda; auto is a GPU if there is one"""
    out: Path = Path("runs/bench_recurrence")
    """folder for bench.json"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.bench.recurrence:bench")
