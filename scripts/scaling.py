"""Fit a scaling law: python scripts/scaling.py folders=runs/sweep parameters=1e8 loss=1.0."""

from cli import command

if __name__ == "__main__":
    command("scaling", "tools.scaling:run", text_keys=("ladder", "folders"))
