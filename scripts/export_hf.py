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

from common.console import errors
from common.settings import UserError


def main() -> None:
    """Parse the command line and export; what a user can mend is one line on standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a run directory (its newest checkpoint), or a checkpoint")
    parser.add_argument("out_dir", type=Path, help="the folder to make")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args()
    from trainer.export_hf import export  # imports torch, which --help needs not wait for

    try:
        export(args.checkpoint, args.out_dir)
    except (UserError, OSError) as error:
        if args.debug:
            raise
        errors.print(f"error: {error}", markup=False, style="red")
        sys.exit(1)
    except KeyboardInterrupt:
        errors.print("error: interrupted; nothing was written", style="red")
        sys.exit(130)


if __name__ == "__main__":
    main()
