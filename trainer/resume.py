"""Where a run begins: at its newest checkpoint, or anew; and what is on record about it."""

import platform
import secrets
import subprocess
from pathlib import Path
from typing import Any

import torch

from common.console import say, warn
from common.files import read_json, write_json
from common.settings import UserError, differences
from data.shards import Manifest
from model.gpt import GPT
from trainer.checkpoint import TrainState, load_weights, newest, open_checkpoint
from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.optim import load_named_state
from trainer.runtime import device_name

# What a run keeps as long as it lives: another value would give it other weights or other batches.
_KEPT = {"model", "seed", "seq_len", "batch_tokens", "data"}


def resume(config: TrainConfig, manifest: Manifest, gpt: GPT, optimizer: torch.optim.Optimizer) -> TrainState:
    """The state of the run's newest checkpoint, its tensors put into model and optimizer; or the state of a new run.

    Raises:
        UserError: the run must not be touched (resume=never), or was begun with another model or other data.
    """
    fresh = TrainState(
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
    path = newest(config.run_dir)
    if path is None:
        return fresh
    if config.resume == "never":
        raise UserError(
            f"run_dir={config.run_dir} holds a run, and resume=never: choose another run_dir, or resume=auto"
        )
    checkpoint = open_checkpoint(path)
    _check_same_run(path, checkpoint.state, fresh)
    load_weights(gpt, checkpoint)
    load_named_state(gpt, optimizer, checkpoint.tensors("optimizer"))
    say(f"resuming {config.run_dir} after step {checkpoint.state.step}")
    return checkpoint.state.model_copy(update={"dataset_dir": fresh.dataset_dir})


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


def write_config(path: Path, config: dict[str, Any], world: World, resumed: bool) -> None:
    """Write config.json: the configuration as run, and the environment. Says what a resumed run has changed."""
    try:
        before = read_json(path)["config"] if resumed else config
    except (UserError, KeyError, TypeError) as error:  # it is on record only: no reason to stop
        warn(f"{path} was damaged and is written anew: {error}")
        before = config
    for key, (old, new) in differences(before, config).items():
        say(f"changed since this run was last started: {key}={new} (before: {old})")
    write_json(path, {"config": config, "environment": _environment(world)})


def _environment(world: World) -> dict[str, Any]:
    """What, besides the configuration, a run's numbers depend on."""
    here = Path(__file__).parent
    try:
        git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
        commit = git.stdout.strip() or None
    except OSError:  # no git on this machine
        commit = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "git_commit": commit,
        "device": device_name(world.device).strip(","),
        "processes": world.size,
    }
