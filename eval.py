"""Evaluate a checkpoint: python eval.py checkpoint=runs/demo."""

from cli import command

if __name__ == "__main__":
    command("eval", "inference.launch:launch_evaluation", "inference.evaluate:EvaluateConfig")
