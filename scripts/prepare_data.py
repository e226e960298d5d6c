"""Make a dataset directory: python scripts/prepare_data.py data=stdlib tokenizer=bytes out_dir=datasets/stdlib."""

from typing import Any


def run(config: dict[str, Any]) -> None:
    """Decode the configuration and prepare the data."""
    from common.settings import decode
    from data.prepare.dataset import PrepareConfig, prepare

    prepare(decode(PrepareConfig, config))


if __name__ == "__main__":  # worker processes import this file too, and need no Hydra
    from cli import command

    command("prepare", run, when_interrupted="interrupted; the same command goes on from what is written")
