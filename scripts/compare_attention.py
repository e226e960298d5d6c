"""Train every attention mechanism in the same small model, on equal terms, and compare it with softmax attention.

    python scripts/compare_attention.py dataset_dir=datasets/pile_bytes out=runs/compare_attention jobs=2

The control is softmax attention with rotary positions in GPT-2's block. Every arm has its parameters within 1 %: models
of `glu` blocks, which have no MLP, have twice the layers, as the published one does; n_embd makes up the rest, in steps
of one, with the same heads. All see the same tokens in the same order, each at its own best learning rate of three or
more, by seed 1; while the best is at an edge of the grid, up to two more are tried. Two more seeds show the spread.
Speed is measured separately, before training: on the CPU, an arm's steps and the control's in turns.

Every run is a folder under `out`, as train.py makes them: after any interruption, the same command continues.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from common.command import Items, Settings, run_script


class Options(Settings):
    dataset_dir: Path
    """what scripts/prepare_data.py made"""
    out: Path = Path("runs/compare_attention")
    """folder for the runs and the report"""
    arms: Items[str] = []
    """some of the arms, such as 'log_space glu none'; []: all"""
    size: Literal["small", "medium", "large"] = "small"
    """about 0.4, 1.8 or 5 million parameters; texts of 256, 512 or 1,024 tokens, and 1, 2 or 4 of them a step"""
    steps: PositiveInt = 2000
    """steps of a run"""
    learning_rates: Items[float] = [1e-3, 2e-3, 4e-3]
    """three or more"""
    jobs: Annotated[int, Field(ge=1, le=64)] = 1
    """runs at a time"""


if __name__ == "__main__":
    message = "interrupted; run the same command again to continue"
    run_script(__doc__, Options, "tools.compare.report:run", when_interrupted=message)
