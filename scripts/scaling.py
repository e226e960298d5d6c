"""Fit a scaling law to runs, and extrapolate it: L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022).

    python scripts/scaling.py ladder='experiment=quickstart model.n_embd=64,96,128 max_steps=300,600,900'
    python scripts/scaling.py folders=runs/sweep parameters=1e8 loss=1.0

N are parameters, D tokens, L nats per token. The first command trains a ladder of models, and continues when it is
started again; the second takes runs that are there. Of each run, the last validation loss counts; runs that have not
finished are left out. Intervals hold 90 % of the laws that are fitted to resampled runs.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.command import Items, Settings, run_script

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Options(Settings):
    ladder: str = ""
    """options of train.py, with several values for some: all combinations are trained first, in OUT/runs"""
    folders: Items[Path] = []
    """folders of runs or of sweeps; put brackets around each of several folders with commas:
    'folders=[runs/s/a=1,b=2],[runs/s/a=2,b=2]'"""
    csv: Path | None = None
    """a table of other runs, with columns parameters, tokens and loss; beside those of folders"""
    out: Path = Path("runs/scaling")
    """folder of scaling.json and scaling.png"""
    parameters: Positive | None = None
    """size of the model to extrapolate to; null: none"""
    loss: Positive | None = None
    """loss that the model should reach; null: only the loss after 20 tokens for each parameter is predicted"""
    tokens_per_second: Positive | None = None
    """rate of the machine for that model, as scripts/plan.py gives it: predicts the hours to `loss`"""
    resamples: Annotated[int, Field(ge=100, le=100_000)] = 1000
    """laws from which the intervals are taken"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.scaling.report:run")
