"""Make a dataset directory.

python scripts/prepare_data.py data=stdlib tokenizer=bytes out_dir=datasets/stdlib
"""

if __name__ == "__main__":  # worker processes import this file too, and need no Hydra
    from cli import command

    message = "interrupted; the same command continues from what is written"
    command(
        "prepare",
        "data.prepare.dataset:prepare",
        "data.prepare.dataset:PrepareConfig",
        when_interrupted=message,
    )
