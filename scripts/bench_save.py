"""What saving costs training: how long a checkpoint blocks the training thread, and how far writing slows its steps.

    python scripts/bench_save.py                                                      # quickstart, heinsen_125m
    python scripts/bench_save.py runs='[experiment=quickstart]' steps=200

It runs train.py's own loop. The first save of each run, which allocates the memory for copies, is left out. Steps
during which a checkpoint is being written are compared with the others of the same run, as medians.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.command import Items, Settings, run_script


class Options(Settings):
    runs: Items[str] = [
        "experiment=quickstart",
        "model=heinsen_125m,seq_len=256,batch_tokens=1024,runtime.micro_batch=4",
    ]
    """options of train.py for each run; brackets hold those of one run together"""
    steps: Annotated[int, Field(ge=8)] = 24
    """steps of a run, which saves a checkpoint after every quarter of them, rounded down"""
    out: Path = Path("runs/bench_save")
    """folder for bench.json and the runs"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.bench.save:bench")
