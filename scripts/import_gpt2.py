"""Make a run of GPT-2's weights.

    python scripts/import_gpt2.py folder=gpt2 run_dir=runs/gpt2

The folder is what `hf download` or save_pretrained wrote for a GPT2LMHeadModel: config.json, tokenizer.json and
model.safetensors. The run gets a checkpoint of step 0, which you can sample from and evaluate. train.py begins a run
with its weights, on any dataset of the same tokenizer, by the command that is printed at the end.
"""

from pathlib import Path

from common.command import Settings, run_script


class Options(Settings):
    folder: Path
    """folder of the GPT2LMHeadModel"""
    run_dir: Path
    """the run to make; it must not hold one"""


if __name__ == "__main__":
    message = "interrupted; choose another run_dir, or remove this one"
    run_script(__doc__, Options, "tools.convert.import_gpt2:import_gpt2", when_interrupted=message)
