"""Train every attention mechanism in the same small model, on equal terms, and compare it with softmax attention.

    python scripts/compare_attention.py dataset_dir=datasets/pile_bytes out=runs/compare size=small jobs=2
    python scripts/compare_attention.py dataset_dir=datasets/pile_bytes arms=log_space_forgets seeds=1

The control is softmax attention with forget gates, rotary positions, convolutions and an output gate in GPT-2's block,
the strongest that we know. Every arm has its parameters within 1 %: models of `glu` blocks, which have no MLP, have
twice the layers, as the published one does; n_embd makes up the rest, in steps of one, with the same heads. All see the
same tokens in the same order, each at its own best learning rate by the first seed; while the best is at an edge of the
grid, up to two more are tried. The other seeds show the spread.
Speed is measured separately, before training: on the CPU, an arm's steps and the control's in turns.

Every run is a folder under `out`/`size`, as train.py makes them: after any interruption, the same command continues.
compare.json, compare.md and compare.png in `out` show every size that has results there.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from common.command import Items, Settings, run_script


class Options(Settings):
    dataset_dir: Path
    """what scripts/prepare_data.py made"""
    out: Path = Path("runs/compare_attention")
    """folder for the runs of all sizes, and for the report"""
    arms: Items[str] = []
    """some of the arms, such as 'log_space glu none'; []: all"""
    size: Literal["small", "medium", "large"] = "small"
    """about 0.4, 2 or 5 million parameters; texts of 256, 512 or 1,024 tokens, and 4, 2 or 4 of them a step"""
    steps: PositiveInt = 2000
    """steps of a run"""
    learning_rates: Annotated[Items[Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)] = [
        2e-3,
        4e-3,
        8e-3,
    ]
    """the grid; one learning rate is used as it is"""
    seeds: Annotated[Items[NonNegativeInt], Field(min_length=1)] = [1, 2, 3]
    """the first one chooses the learning rate"""
    jobs: Annotated[int, Field(ge=1, le=64)] = 1
    """runs at a time"""


if __name__ == "__main__":
    message = "interrupted; run the same command again to continue"
    run_script(__doc__, Options, "tools.compare.report:run", when_interrupted=message)
