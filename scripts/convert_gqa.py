"""Share the key and value heads of a trained model, in a new run.

    python scripts/convert_gqa.py checkpoint=runs/gpt2 run_dir=runs/gpt2-gqa n_kv_head=4

The new run's checkpoint of step 0 holds the model with fewer key and value heads, each the mean of a group's (Ainslie
et al. 2023, section 2.1). Where the heads of a group were equal, it is the same model. You can sample from it and
evaluate it. Train it further, for a few per cent of the first run's steps, with train.py, the settings of the first
run, and those that this prints at the end: they begin another run with its weights.
"""

from pathlib import Path

from common.command import Settings, run_script


class Options(Settings):
    checkpoint: Path
    """a run directory, or one of its checkpoints"""
    run_dir: Path
    """the run to make; it must not hold one"""
    n_kv_head: int
    """key and value heads; 1: all query heads share one"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.convert.gqa:convert")
