"""Where a run begins: at its newest checkpoint, or anew; and what is on record about it."""

import os
import platform
import secrets
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from common.commit import git_commit
from common.console import say, warn
from common.files import read_json, write_json
from common.lock import owned
from common.settings import UserError, differences
from data.shards import Manifest
from model.gpt import GPT
from trainer.checkpoint import TrainState, checkpoint_path, newest_whole, open_checkpoint, step_of
from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.optim import named_state
from trainer.randomness import RANDOM, random_tensors, seed_process, set_random_state
from trainer.runtime import device_name

# What a run keeps as long as it lives: another value would give it other weights or other batches.
_KEPT = {"model", "seed", "seq_len", "batch_tokens", "data"}


def new_state(config: TrainConfig, manifest: Manifest) -> TrainState:
    """The state of a run before its first step."""
    return TrainState(
        step=0,
        run_id=secrets.token_hex(4),
        model=config.model,
        seed=config.seed,
        seq_len=config.seq_len,
        batch_tokens=config.batch_tokens,
        data=config.data,
        dataset_dir=config.dataset_dir.absolute(),
        dataset_fingerprint=manifest.fingerprint,
    )


def find_checkpoint(run_dir: Path, world: World) -> Path | None:
    """The newest whole checkpoint of a run, the same in all processes; None if there is none at all.

    Raises:
        UserError: none of its checkpoints is whole, or a process does not see the one that the main process found.
    """
    found = torch.zeros(1, dtype=torch.int64, device=world.device)
    if world.is_main:  # one reads and sums all of it, and the others take its word
        path = newest_whole(run_dir, at=world.at)
        found += 0 if path is None else step_of(path) + 1
    step = int(world.sum(found)) - 1
    if step < 0:
        return None
    path = checkpoint_path(run_dir, step)
    seen = world.gather(torch.tensor([float(path.is_dir())], device=world.device))
    if blind := [str(rank) for rank, sees in enumerate(seen) if not sees]:
        raise UserError(
            f"{path} is not there for process {', '.join(blind)}: put run_dir on a file system that all machines share"
        )
    return path


def restore(path: Path, fresh: TrainState, gpt: GPT, optimizer: torch.optim.Optimizer, world: World) -> TrainState:
    """Put a checkpoint's tensors into model, optimizer and random numbers; returns its state.

    Args:
        path: a checkpoint whose files are whole.
        fresh: the run's state as it would begin.

    Raises:
        UserError: the checkpoint is of a run with another model or other data.
    """
    checkpoint = open_checkpoint(path, files=())
    state = checkpoint.state
    _check_same_run(path, state, fresh)
    for name, tensors in (("model", gpt.state_dict()), ("optimizer", named_state(gpt, optimizer))):
        world.at(f"reading {name}")
        stored = checkpoint.tensors(name, {key: (value.shape, (value.dtype,)) for key, value in tensors.items()})
        with torch.no_grad():
            for key, value in tensors.items():
                value.copy_(world.like(stored[key], value))
    saved_states = checkpoint.tensors("random", random_tensors(state.processes, state.device))
    if (state.processes, state.device) == (world.size, world.device.type):
        set_random_state(saved_states[RANDOM][world.rank], world.device)
    else:  # as many generators as there are now, that none of those before was like
        seed_process(f"{state.seed} {state.step} {world.rank}")
    return state.model_copy(update={"dataset_dir": fresh.dataset_dir})


def _check_same_run(path: Path, before: TrainState, now: TrainState) -> None:
    if before.dataset_fingerprint != now.dataset_fingerprint:
        raise UserError(
            f"{path} was trained on {before.dataset_dir}, whose content is not that of "
            f"dataset_dir={now.dataset_dir}: use that dataset, or another run_dir"
        )
    changed = differences(before.model_dump(mode="json", include=_KEPT), now.model_dump(mode="json", include=_KEPT))
    if changed:
        listed = ", ".join(f"{key}={new} (checkpoint: {old})" for key, (old, new) in changed.items())
        raise UserError(f"{path} is of another run: {listed}; use those settings, or another run_dir")


def own_run(run_dir: Path) -> AbstractContextManager[None]:
    """Keep other processes from training in run_dir as long as the context.

    Raises:
        UserError: one does already; a lock that a dead process left behind is no obstacle.
    """

    def taken() -> str:
        try:
            environment = read_json(run_dir / "config.json")["environment"]
            holder = f"process {environment['pid']} on {environment['host']}"
        except (UserError, KeyError, TypeError):  # it has not come to writing that
            holder = "another process"
        return f"run_dir={run_dir} is being trained in by {holder}: wait until it is done, or use another run_dir"

    return owned(run_dir / "run.lock", taken)


def write_config(path: Path, config: dict[str, Any], world: World, found: dict[str, int], resumed: bool) -> None:
    """Write config.json: the configuration as run, and the environment, with what was `found` out about the model.

    Says what a resumed run has changed.
    """
    try:
        before = read_json(path)["config"] if resumed else config
    except (UserError, KeyError, TypeError) as error:  # it is on record only: no reason to stop
        warn(f"{path} was damaged and is written anew: {error}")
        before = config
    for key, (old, new) in differences(before, config).items():
        say(f"changed since this run was last started: {key}={new} (before: {old})")
    write_json(path, {"config": config, "environment": _environment(world) | found})


def _environment(world: World) -> dict[str, Any]:
    """What, besides the configuration, a run's numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "git_commit": git_commit(),
        "device": device_name(world.device).strip(","),
        "processes": world.size,
        "host": platform.node(),
        "pid": os.getpid(),
    }
