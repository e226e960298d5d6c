"""Train attention mechanisms on a recall task of growing difficulty, and draw how many answers they get right.

    python scripts/recall.py task=mqar difficulties=4,16,64 head_dim=8,32 out=runs/recall jobs=2
    python scripts/recall.py task=induction difficulties=64,256,1024 out=runs/induction
    python scripts/recall.py task=passkey difficulties=1024 tested_at=8192,65536 arms=log_space_forgets out=runs/far

Every model has 4 layers of 64 features a token and 2 heads; head_dim sets the size of its state. As in Arora et al.
2023 and Gu and Dao 2023, the training loss counts answers only; as in the former, an arm is shown at its best learning
rate. A step has 32 new documents. A run ends early once it has 99 % of the answers right. Accuracy is the share of
answer tokens of held-out documents that are the most likely token, given all tokens before them.

Results are files under `out`: after any interruption, the same command goes on after the runs that are finished.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from common.command import Items, Settings, run_script


class Options(Settings):
    task: Literal["mqar", "induction", "selective_copy", "passkey"] = "mqar"
    """a recall task of configs/data"""
    difficulties: Annotated[Items[PositiveInt], Field(min_length=1)] = [4, 8, 16, 32, 64]
    """pairs of mqar, letters of selective_copy, length of induction and passkey"""
    arms: Annotated[Items[str], Field(min_length=1)] = [
        "softmax_forgets_rotary",
        "log_space_forgets",
        "hybrid_softmax",
        "hybrid_window",
        "log_space mlp log_recurrence",
        "linear mlp rotary",
        "sliding_window mlp rotary",
    ]
    """arms of scripts/compare_attention.py; hybrids have three layers of log_space_forgets and one of the other"""
    head_dim: Annotated[Items[PositiveInt], Field(min_length=1)] = [16]
    """features of a head"""
    tested_at: Items[PositiveInt] = []
    """each model is also tested at these difficulties, without training on them"""
    out: Path = Path("runs/recall")
    """folder for datasets, results, recall.json and recall.png"""
    steps: PositiveInt = 2000
    """most steps of a run"""
    learning_rates: Annotated[Items[Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)] = [
        1e-3,
        3e-3,
    ]
    """all are tried"""
    seed: NonNegativeInt = 1
    """seed of data and weights"""
    jobs: Annotated[int, Field(ge=1, le=64)] = 1
    """runs at a time"""


if __name__ == "__main__":
    message = "interrupted; run the same command again to continue"
    run_script(__doc__, Options, "tools.compare.recall:run", when_interrupted=message)
