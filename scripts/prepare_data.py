"""Make a dataset directory: python scripts/prepare_data.py data=stdlib tokenizer=bytes out_dir=datasets/stdlib."""

from typing import Any

from cli import command


def run(config: dict[str, Any]) -> None:
    """Decode the configuration and prepare the data."""
    from common.settings import decode
    from data.prepare import PrepareConfig, prepare

    prepare(decode(PrepareConfig, config))


if __name__ == "__main__":
    command("prepare", run, when_interrupted="interrupted; the same command goes on from what is written")
