"""Evaluate a checkpoint: python eval.py checkpoint=runs/demo."""

from typing import Any

from cli import command, configure

CONFIG = "inference.evaluate:EvaluateConfig"


def evaluate(*options: str, **settings: Any) -> dict[str, Any]:
    """Evaluate in this process, as in evaluate(checkpoint="runs/demo"); returns eval.json."""
    config = configure("eval", CONFIG, options, settings)
    from inference.evaluate import run_evaluation

    return run_evaluation(config)


if __name__ == "__main__":
    command("eval", "inference.evaluate:launch_evaluation", CONFIG)
