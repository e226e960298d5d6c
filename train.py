"""Train a GPT: python train.py experiment=quickstart run_dir=runs/demo."""

from typing import TYPE_CHECKING, Any

from cli import command, configure

if TYPE_CHECKING:
    from trainer.launch import Trained

CONFIG = "trainer.config:TrainConfig"
TEXT_KEYS = ("eval.prompt",)


def train(*options: str, **settings: Any) -> "Trained":
    """Train in this process: train("experiment=quickstart", run_dir="runs/demo", max_steps=100).

    Returns:
        The trained model, its tokenizer, and its metrics.
    """
    config = configure("train", CONFIG, options, settings, TEXT_KEYS)
    from trainer.launch import train_here

    return train_here(config)


if __name__ == "__main__":
    message = "interrupted, and no step is lost: the same command starts the run, or continues it"
    command(
        "train",
        "trainer.launch:launch_training",
        CONFIG,
        text_keys=TEXT_KEYS,
        when_interrupted=message,
        check="trainer.loop:check_run",
        after_sweep="tools.report:show_runs",
    )
