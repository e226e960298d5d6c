"""Make a dataset directory.

python scripts/prepare_data.py data=stdlib tokenizer=bytes out_dir=datasets/stdlib
"""

from pathlib import Path
from typing import Any

CONFIG = "data.prepare.dataset:PrepareConfig"


def prepare(*options: str, **settings: Any) -> Path:
    """Make a dataset, as in prepare("data=stdlib", tokenizer="bytes", out_dir="datasets/stdlib").

    Returns:
        Its directory.
    """
    from cli import configure

    config = configure("prepare", CONFIG, options, settings)
    from data.prepare import dataset

    dataset.prepare_dataset(config)
    return config.out_dir


if __name__ == "__main__":  # worker processes import this file too, and need no Hydra
    from cli import command

    message = "interrupted; the same command continues from what is written"
    command("prepare", "data.prepare.dataset:prepare_dataset", CONFIG, when_interrupted=message)
