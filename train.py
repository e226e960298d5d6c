"""Train a GPT: python train.py experiment=quickstart run_dir=runs/demo."""

from typing import Any

from cli import command


def run(config: dict[str, Any]) -> float | None:
    """Decode the configuration and train; returns the lowest validation loss, which sweepers go by."""
    from common.settings import decode
    from trainer.config import TrainConfig
    from trainer.loop import fit

    return fit(decode(TrainConfig, config))


if __name__ == "__main__":
    command("train", run, when_interrupted="interrupted; the same command continues from the last checkpoint")
