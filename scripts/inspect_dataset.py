"""Inspect a dataset: python scripts/inspect_dataset.py dataset_dir=datasets/pile random=3."""

from cli import command

if __name__ == "__main__":
    command("inspect_dataset", "tools.inspect_dataset:inspect_dataset", text_keys=("window",))
