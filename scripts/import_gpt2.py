"""Make a run of GPT-2's weights: python scripts/import_gpt2.py gpt2 runs/gpt2 --dataset-dir datasets/pile.

The folder is what `hf download` or save_pretrained wrote of a GPT2LMHeadModel: config.json, tokenizer.json
and model.safetensors. The run has a checkpoint of step 0, to sample from, to evaluate, and, with a dataset of the same
tokenizer, to train by the command that is printed at the end. Its seed and its sizes of batches are fixed here.
"""

import argparse
import sys
from pathlib import Path

from common.command import parser_of, run_script


def main() -> int:
    """Parse the command line and import."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="of the GPT2LMHeadModel")
    parser.add_argument("run_dir", type=Path, help="the run to make; it must not hold one")
    parser.add_argument("--dataset-dir", type=Path, help="what to train on, of prepare_data.py; default: no training")
    parser.add_argument("--seq-len", type=int, help="tokens of a training sequence; default: the model's positions")
    parser.add_argument("--batch-tokens", type=int, help="tokens of a training step; default: 480 sequences")
    parser.add_argument("--seed", type=int, default=1, help="of the data's order; default: 1")
    return run_script(parser, run, when_interrupted="interrupted; choose another run_dir, or remove this one")


def run(options: argparse.Namespace) -> None:
    """Import."""
    from tools.convert.import_gpt2 import import_gpt2  # imports torch, which --help needs not wait for

    import_gpt2(**{name: value for name, value in vars(options).items() if name != "debug"})


if __name__ == "__main__":
    sys.exit(main())
