"""The parts that several tasks have prepared, joined into the very bytes that one machine would have made."""

import re
from pathlib import Path

from common.settings import UserError
from data.prepare.dataset import part_dir
from data.prepare.join import existing, join, partial_dir
from data.prepare.parts import FINISHED, PLAN, read_plan, writing
from data.shards import Manifest

_PART_NAME = re.compile(r"task-(\d{5})-of-(\d{5})")


def merge(parts_dir: Path, out_dir: Path) -> Manifest:
    """Join what all tasks have written into `parts_dir` to the dataset `out_dir`.

    Raises:
        UserError: a task is not finished, its parts are damaged, or it had other settings than the first; or
            `prepare` was stopped before it finished this dataset.
    """
    folders = find_tasks(parts_dir)
    plans = [read_plan(folder) for folder in folders]
    for folder, plan in zip(folders, plans, strict=True):
        if changes := plans[0].changes(plan):
            other = f"{folder} was made with other settings than {folders[0].name}"
            raise UserError(f"{other}: {changes}: prepare one of them again")
    if (manifest := existing(out_dir, plans[0].prepared, plans[0].tokenizer.sha256)) is not None:
        return manifest
    with writing(partial := partial_dir(out_dir)):
        if (partial / PLAN).exists():  # joining deletes the folder in the end
            raise UserError(f"{partial} holds an unfinished preparation: finish it, delete it, or give another out_dir")
        return join(folders, plans[0], out_dir)


def find_tasks(parts_dir: Path) -> list[Path]:
    """Return the folders of all tasks, in order.

    Raises:
        UserError: there are none, or some are missing or not finished.
    """
    found = [match for path in parts_dir.glob("task-*") if (match := _PART_NAME.fullmatch(path.name))]
    totals = sorted({int(match[2]) for match in found})
    if not totals:
        raise UserError(f"{parts_dir} holds no task-00000-of-...: give the out_dir of prepare_data.py num_tasks=N")
    if len(totals) > 1:
        raise UserError(f"{parts_dir} holds parts of num_tasks={totals[0]} and num_tasks={totals[1]}: delete one kind")
    folders = [part_dir(parts_dir, i, totals[0]) for i in range(totals[0])]
    missing = [i for i, folder in enumerate(folders) if not (folder / FINISHED).is_file()]
    if missing:
        what = f"{folders[missing[0]]} is missing or not finished ({len(missing)} of {totals[0]} are)"
        raise UserError(f"{what}: run the command that made the others with task_index={missing[0]}")
    return folders
