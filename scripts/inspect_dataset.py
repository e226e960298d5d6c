"""Look into a dataset: its sets, its text, and which documents a training step is made of.

python scripts/inspect_dataset.py dataset_dir=datasets/pile                          # table of the sets
python scripts/inspect_dataset.py dataset_dir=datasets/pile random=3 window=123456   # text at random and given places
python scripts/inspect_dataset.py run_dir=runs/demo step=100                         # what a run read in a step
"""

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from common.command import Items, Settings, run_script


class Options(Settings):
    dataset_dir: Path | None = None
    """what scripts/prepare_data.py made; null: what run_dir was trained on"""
    split: Literal["train", "val"] = "train"
    """train or val: whose text to show"""
    window: Items[int] = []
    """tokens of the split: shows the text from these places on"""
    random: NonNegativeInt = 0
    """shows text from this many random places"""
    tokens: PositiveInt = 128
    """most tokens of each text to show"""
    step: PositiveInt | None = None
    """shows the text behind this training step and its documents; the first is 1"""
    run_dir: Path | None = None
    """the run that the step belongs to"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.report.dataset:inspect")
