"""Write a model for Hugging Face's transformers.

    python scripts/export_hf.py checkpoint=runs/pile out_dir=exports/pile

The folder loads without this program:

    AutoTokenizer.from_pretrained("exports/pile")
    AutoModelForCausalLM.from_pretrained("exports/pile", trust_remote_code=True)

A model of GPT-2's architecture (softmax attention, mlp blocks, learned positions) becomes a plain GPT2LMHeadModel and
needs no trust_remote_code; any other brings its code along.
"""

from pathlib import Path

from common.command import Settings, run_script


class Options(Settings):
    checkpoint: Path
    """a run directory (its newest checkpoint), or a checkpoint"""
    out_dir: Path
    """the folder to make"""
    average: bool = True
    """the averaged weights, if the run has them; false: those of its last step"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.convert.export_hf:export", when_interrupted="interrupted; nothing was written")
