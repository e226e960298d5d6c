"""Train every attention mechanism in the same small model, on equal terms, and compare it with softmax attention.

    python scripts/compare_attention.py --dataset datasets/pile_bytes --out runs/compare_attention --jobs 2

The control is softmax attention with rotary positions in GPT-2's block. Every arm has its parameters within 1 %: models
of `glu` blocks, which have no MLP, have twice the layers, as the published one does; what is left is made up by n_embd,
in steps of one, the heads as they are. All see the same tokens in the same order, each at its own best learning rate of
three or more, by seed 1; while the best is at an edge of the grid, up to two more are tried. Two more seeds tell the
spread. Speed is measured apart, before training: on the CPU, an arm's steps and the control's in turns.

A run is a folder under --out, as train.py makes them: whatever stops this, the same command goes on from there.
"""

import argparse
import shlex
import sys
from pathlib import Path

from common.command import parser_of, positive, run_script
from common.console import say


def main() -> int:
    """Parse the command line and compare."""
    parser = parser_of(__doc__)
    parser.add_argument("--dataset", type=Path, required=True, help="what scripts/prepare_data.py made")
    parser.add_argument("--out", type=Path, default=Path("runs/compare_attention"))
    parser.add_argument("--arms", nargs="+", help="some of them, such as 'log_space glu none'; default: all")
    parser.add_argument("--steps", type=positive, default=2000, help="of a run, 256 tokens each")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3], help="three or more")
    parser.add_argument("--jobs", type=int, default=1, choices=range(1, 65), metavar="N", help="runs at a time")
    return run_script(parser, compare, when_interrupted="interrupted; the same command goes on from here")


def compare(options: argparse.Namespace) -> None:
    """Measure speed, train what is not trained yet, report what there is."""
    import torch  # here, because --help need not wait for it

    from tools.compare.compare import CONTROL, SEQ_LEN, Terms, count, models_of, train_all
    from tools.compare.report import report, speeds

    torch.set_num_threads(1)  # the products are small, and the bits of a result depend on the number of threads
    terms = Terms(options.dataset, options.out, options.steps, options.learning_rates)
    models = models_of(options.dataset, options.arms)
    terms.open()
    say(f"{len(models)} arms of {count(models[CONTROL]):,} parameters, {terms.steps * SEQ_LEN:,} tokens a run")
    speed = speeds(models, terms.out / "speed.json")
    try:
        train_all(models, terms, options.jobs)
    finally:
        report(models, speed, terms, shlex.join(["python", "scripts/compare_attention.py", *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
