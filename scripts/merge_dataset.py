"""Join the parts of a dataset that several tasks prepared.

    python scripts/merge_dataset.py parts_dir=datasets/pile-parts out_dir=datasets/pile

scripts/prepare_data.py with num_tasks left the parts in its out_dir. The result is byte for byte the dataset that one
machine makes without num_tasks. The parts are kept; delete them when you have verified it.
"""

from pathlib import Path

from common.command import Settings, run_script


class Options(Settings):
    parts_dir: Path
    """the out_dir of the tasks, with task-00000-of-... and so on in it"""
    out_dir: Path
    """the dataset directory to make"""


if __name__ == "__main__":
    message = "interrupted; run the same command again to continue"
    run_script(__doc__, Options, "data.prepare.merge:merge", when_interrupted=message)
