"""Write a model for Hugging Face's transformers: python scripts/export_hf.py runs/pile exports/pile.

The folder loads without this program:

    AutoTokenizer.from_pretrained("exports/pile")
    AutoModelForCausalLM.from_pretrained("exports/pile", trust_remote_code=True)

A model of GPT-2's architecture (softmax attention, mlp blocks, learned positions) is a plain GPT2LMHeadModel, and needs
no trust_remote_code; any other brings its code along.
"""

import argparse
import sys
from pathlib import Path

from common.command import parser_of, run_script


def main() -> int:
    """Parse the command line and export."""
    parser = parser_of(__doc__)
    parser.add_argument("checkpoint", type=Path, help="a run directory (its newest checkpoint), or a checkpoint")
    parser.add_argument("out_dir", type=Path, help="the folder to make")
    return run_script(parser, run, when_interrupted="interrupted; nothing was written")


def run(options: argparse.Namespace) -> None:
    """Export."""
    from tools.convert.export_hf import export  # imports torch, which --help needs not wait for

    export(options.checkpoint, options.out_dir)


if __name__ == "__main__":
    sys.exit(main())
