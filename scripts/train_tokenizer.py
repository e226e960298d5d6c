"""Learn a vocabulary: python scripts/prepare_data.py data=stdlib tokenizer=bytes out_dir=datasets/stdlib."""

from cli import command

if __name__ == "__main__":
    command("train_tokenizer", "data.prepare.vocabulary:learn", when_interrupted="interrupted; nothing was written")
