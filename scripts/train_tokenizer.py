"""Learn a vocabulary, byte-level BPE, from the training documents of a dataset.

    python scripts/prepare_data.py data=stdlib tokenizer=bytes out_dir=datasets/stdlib
    python scripts/train_tokenizer.py dataset_dir=datasets/stdlib n_vocab=4096 out=tokenizer.json
    python scripts/prepare_data.py data=stdlib tokenizer=hf tokenizer.path=tokenizer.json out_dir=datasets/stdlib_4096

Datasets and checkpoints keep a copy: the file may move. Hugging Face's tokenizers and transformers read it, too.
"""

from pathlib import Path

from common.command import Settings, run_script


class Options(Settings):
    dataset_dir: Path
    """what scripts/prepare_data.py made, with any tokenizer"""
    n_vocab: int
    """ids to have, <|endoftext|> included"""
    out: Path = Path("tokenizer.json")
    """the file to write"""


if __name__ == "__main__":
    run_script(__doc__, Options, "data.prepare.vocabulary:learn", when_interrupted="interrupted; nothing was written")
