"""Learn a vocabulary.

python scripts/train_tokenizer.py dataset_dir=datasets/stdlib n_vocab=4096
"""

from cli import command

if __name__ == "__main__":
    command(
        "train_tokenizer",
        "data.prepare.vocabulary:learn_vocabulary",
        when_interrupted="interrupted; nothing was written",
    )
