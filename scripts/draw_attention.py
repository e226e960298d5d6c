"""Draw who attends to whom in a short sentence: every attention mechanism, or the layers of a trained model.

    python scripts/draw_attention.py out=docs/attention_masks.png
    python scripts/draw_attention.py checkpoint=runs/demo text="def main(" out=runs/demo/attention.png

A row is a token that reads, a column one that is read; grey marks what the mechanism does not let it read. Blue is the
weight, relative to the row's largest. A mechanism without a matrix of weights in its fast form has one by its
definition: log-space attention exp(q) exp(k)^T, linear attention phi(q) phi(k)^T, each row divided by its sum. Without
a checkpoint the models are untrained: their weights show only the form of a mechanism.
"""

from pathlib import Path

from common.command import Settings, run_script


class Options(Settings):
    checkpoint: Path | None = None
    """a run or a checkpoint: draws a panel for each of its layers"""
    head: int = 1
    """head of the checkpoint's layers; the first is 1"""
    text: str = "the cat that the old dog saw sat on the mat and the dog lay down"
    """the sentence"""
    out: Path = Path("attention.png")
    """the picture"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.report.attention_masks:draw")
