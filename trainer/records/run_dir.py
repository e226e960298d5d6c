"""A run's directory: who trains in it, and config.json, the record of how the run was started."""

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from common.command_line import format_changes
from common.commit import git_commit
from common.console import copy_lines_to, say, warn
from common.files import hold_lock, new_directory, read_json, write_json
from common.settings import JsonDict, UserError, find_differences
from runtime.device import device_name
from runtime.distributed import World

LOG = "console.log"
_RECORDS = ("config.json", "metrics.jsonl", "loss.png", "samples.txt", LOG)
"""What a run writes beside its checkpoints."""
_ROUNDING = ("device", "dtype", "processes", "torch")
"""Entries of the environment that rounding depends on."""


def check_folder(run_dir: Path) -> None:
    """Raise UserError if run_dir is something else than a run, or has files to overwrite."""
    if (run_dir / "checkpoints").exists():
        return
    if (run_dir / "manifest.json").exists():
        raise UserError(
            f"run_dir={run_dir} is a dataset or a checkpoint: choose another folder for the run"
        )
    runs = sorted(run_dir.glob("*/checkpoints"))
    if runs:
        raise UserError(
            f"run_dir={run_dir} has runs in it, such as {runs[0].parent.name}: "
            "choose a folder beside them"
        )
    records = [name for name in _RECORDS if (run_dir / name).exists()]
    if records and not (run_dir / "run.lock").exists():
        raise UserError(
            f"run_dir={run_dir} is no run, and training would overwrite its {records[0]}: "
            "choose another"
        )


@contextlib.contextmanager
def own_run(run_dir: Path) -> Iterator[None]:
    """Make run_dir, and keep other processes from training in it while the context lasts.

    A run that fails before it wrote anything leaves no folder.

    Raises:
        UserError: another process already trains there. The lock of a dead process does not count.
    """

    def refusal() -> str:
        try:
            environment = read_json(run_dir / "config.json")["environment"]
            holder = f"process {environment['pid']} on {environment['host']}"
        except (UserError, KeyError, TypeError):  # it has not written that yet
            holder = "another process"
        remedy = "wait until it is done, or use another run_dir"
        return f"run_dir={run_dir} is being trained in by {holder}: {remedy}"

    lock = run_dir / "run.lock"
    log = run_dir / LOG
    with new_directory(run_dir, "run_dir"), hold_lock(lock, refusal), copy_lines_to(log):
        if not os.path.lexists(log):
            log.touch()
        try:
            yield
        finally:
            if {*run_dir.iterdir()} == {lock, log}:
                lock.unlink()
                log.unlink()


def write_config(
    path: Path, config: JsonDict, world: World, derived: JsonDict, resumed: bool
) -> None:
    """Write config.json: the configuration, and the environment that a run's numbers depend on.

    Prints what changed since the run was last started. `derived` is what else is known about model
    and device.
    """
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "git_commit": git_commit(),
        "device": device_name(world.device),
        "threads": torch.get_num_threads(),
        "processes": world.size,
        "host": platform.node(),
        "pid": os.getpid(),
        **derived,
    }
    if resumed:
        _say_changes(path, config, environment)
    write_json(path, {"config": config, "environment": environment})


def _say_changes(path: Path, config: JsonDict, environment: JsonDict) -> None:
    """Print what differs from config.json, of settings and of what rounding depends on."""
    try:
        file = read_json(path)
        before = {key: file["environment"][key] for key in _ROUNDING}
        now = {key: environment[key] for key in _ROUNDING}
        # The same files may be elsewhere.
        paths = {key: config[key] for key in ("dataset_dir", "run_dir")}
        changes = find_differences(file["config"] | paths, config) | find_differences(before, now)
    except (UserError, KeyError, TypeError, AttributeError) as error:
        return warn(f"{path} is damaged: {error}")  # it is only a record: no reason to stop
    renamed = tuple(key.removesuffix("name") for key in changes if key.endswith(".name"))
    to_say = {}
    for key, values in changes.items():
        # If a name such as schedule.name changed, leave out keys that only one of the two has.
        is_of_one = key.startswith(renamed) and None in values
        if key.endswith(".name") or not is_of_one:
            to_say[key] = values
    for line in format_changes(to_say, "was"):
        say(f"changed: {line}")
