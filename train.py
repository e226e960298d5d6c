"""Train a GPT: python train.py experiment=quickstart run_dir=runs/demo."""

from typing import Any

from cli import command


def run(config: dict[str, Any]) -> None:
    """Decode the configuration and train."""
    from common.settings import decode
    from trainer.config import TrainConfig
    from trainer.loop import fit

    fit(decode(TrainConfig, config))


if __name__ == "__main__":
    command("train", run, when_interrupted="interrupted; the same command continues from the last checkpoint")
