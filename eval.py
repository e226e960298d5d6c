"""Evaluate a checkpoint: python eval.py checkpoint=runs/demo."""

from cli import command

if __name__ == "__main__":
    command("eval", "inference.evaluate:run_evaluation", "inference.evaluate:EvaluateConfig")
