"""Make a run of GPT-2's weights.

    python scripts/import_gpt2.py folder=gpt2 run_dir=runs/gpt2 dataset_dir=datasets/pile

The folder is what `hf download` or save_pretrained wrote for a GPT2LMHeadModel: config.json, tokenizer.json and
model.safetensors. The run gets a checkpoint of step 0, which you can sample from, evaluate and, with a dataset of the
same tokenizer, train with the command that is printed at the end. Its seed and its batch sizes are fixed here.
"""

from pathlib import Path

from common.command import Settings, run_script


class Options(Settings):
    folder: Path
    """folder of the GPT2LMHeadModel"""
    run_dir: Path
    """the run to make; it must not hold one"""
    dataset_dir: Path | None = None
    """dataset to train on, from scripts/prepare_data.py; null: no training"""
    seq_len: int | None = None
    """tokens of a training sequence; null: the model's positions"""
    batch_tokens: int | None = None
    """tokens of a training step; null: 480 sequences"""
    seed: int = 1
    """seed of the data's order"""


if __name__ == "__main__":
    message = "interrupted; choose another run_dir, or remove this one"
    run_script(__doc__, Options, "tools.convert.import_gpt2:import_gpt2", when_interrupted=message)
