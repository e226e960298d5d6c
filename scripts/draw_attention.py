"""Draw who attends to whom in a short sentence: every attention mechanism, or the layers of a trained model.

    python scripts/draw_attention.py --out docs/attention_masks.png
    python scripts/draw_attention.py --checkpoint runs/demo --text "def main(" --out runs/demo/attention.png

A row is a token that reads, a column one that is read; grey is what the mechanism does not let it read. Blue is the
weight, relative to the row's largest. What has no matrix of weights in its fast form has one by its definition:
log-space attention exp(q) exp(k)^T, linear attention phi(q) phi(k)^T, each row divided by its sum. Without a checkpoint
the models are as they are initialised, so that their weights tell no more than a mechanism's form.
"""

import argparse
import sys
from pathlib import Path

from common.command import parser_of, run_script
from common.console import say
from common.files import write_atomic

SENTENCE = "the cat that the old dog saw sat on the mat and the dog lay down"


def main() -> int:
    """Parse the command line and draw."""
    parser = parser_of(__doc__)
    parser.add_argument("--checkpoint", type=Path, help="a run, or a checkpoint: a panel for each of its layers")
    parser.add_argument("--head", type=int, default=1, help="of the checkpoint's; the first is 1")
    parser.add_argument("--text", default=SENTENCE)
    parser.add_argument("--out", type=Path, default=Path("attention.png"))
    return run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    """Draw and write."""
    # here, because --help need not wait for torch
    from tools.report.attention_masks import of_checkpoint, of_mechanisms, picture

    if options.checkpoint:
        labels, panels = of_checkpoint(options.checkpoint, options.text, options.head)
    else:
        labels, panels = of_mechanisms(options.text)
    write_atomic(options.out, picture(labels, panels))
    say(f"{len(panels)} panels are in {options.out}")


if __name__ == "__main__":
    sys.exit(main())
