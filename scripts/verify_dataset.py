"""Verify a dataset: python scripts/verify_dataset.py dataset_dir=datasets/pile."""

from cli import command

if __name__ == "__main__":
    message = "interrupted: the dataset is not verified"
    command("verify_dataset", "data.prepare.verify:verify_or_exit", when_interrupted=message)
