"""Evaluate a checkpoint: python eval.py checkpoint=runs/demo."""

from typing import Any

from cli import command


def run(config: dict[str, Any]) -> None:
    """Decode the configuration and evaluate."""
    from common.settings import decode
    from inference.evaluate import EvaluateConfig, run_evaluation

    run_evaluation(decode(EvaluateConfig, config))


if __name__ == "__main__":
    command("eval", run)
