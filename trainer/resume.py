"""Starts a run or resumes it from its newest checkpoint, and records how it was run."""

import os
import platform
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.commit import git_commit
from common.console import say, warn
from common.files import read_json, write_json
from common.lock import owned
from common.settings import UserError, differences
from data.shards import Manifest
from data.tokenizer import Tokenizer, load_tokenizer
from model.gpt import GPT, GPTConfig, GPTState
from model.state import restored, tensors_of
from trainer.checkpoint import (
    FLOATS,
    Checkpoint,
    Kept,
    TrainState,
    checkpoint_path,
    newest_whole,
    open_checkpoint,
    open_model,
    read_weights,
    step_of,
)
from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.randomness import RANDOM, random_tensors, seed_process, set_random_state
from trainer.runtime import device_name
from trainer.tensor_file import Expected

_KEPT = set(Kept.model_fields)
_ROUNDING = "device", "dtype", "torch"  # parts of the environment that rounding depends on


def new_state(config: TrainConfig, manifest: Manifest) -> TrainState:
    """The state of a run before its first step."""
    return TrainState(
        optimizer=config.optim.name,
        step=0,
        run_id=secrets.token_hex(4),
        dataset_dir=config.dataset_dir.absolute(),
        dataset_fingerprint=manifest.fingerprint,
        **{name: getattr(config, name) for name in _KEPT},
    )


def initialise(gpt: GPT, world: World, dtype: torch.dtype) -> None:
    """Give a sharded model that is on the meta device the weights that GPT(gpt.config) would have here.

    Each process draws all of them, one block at a time, and keeps its parts.
    """
    weights = gpt.to_empty(device=world.device).state_dict()
    for name, module in gpt.config.parts():
        for key, value in module.to(dtype).state_dict(prefix=f"{name}.").items():
            weights[key].copy_(world.like(value, weights[key]))


def open_source(path: Path, config: GPTConfig, tokenizer: Tokenizer) -> Checkpoint:
    """Open the checkpoint init_from=path, whose weights a run with this model and tokenizer begins with.

    Raises:
        UserError: there is no whole checkpoint, or its model or tokenizer is another one.
    """
    source = open_model(path, key="init_from")
    trained = load_tokenizer(source.path / "tokenizer.json")
    if trained.sha256 != tokenizer.sha256:
        before, here = (f"{each.name} (n_vocab {each.n_vocab})" for each in (trained, tokenizer))
        what = f"init_from={path} was trained with the tokenizer {before}, and the dataset has {here}"
        raise UserError(f"{what}: prepare the dataset with the model's tokenizer")
    changed = differences(source.state.model.model_dump(mode="json"), config.model_dump(mode="json"))
    if changed:
        listed = [f"model.{key}={old} (here: {new})" for key, (old, new) in changed.items()]
        more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
        remedy = f"give the experiment or the model settings of {source.run_dir}"
        raise UserError(f"init_from={path} has another model: {', '.join(listed[:3])}{more}; {remedy}")
    return source


def take_weights(gpt: GPT, path: Path, tokenizer: Tokenizer, world: World) -> None:
    """Give the model the weights of the checkpoint init_from=path, the averaged ones if it has them.

    Raises:
        UserError: as `open_source`; or the processes do not all find the same checkpoint.
    """
    world.at(f"reading init_from={path}")
    source, weights = open_source(path, gpt.config, tokenizer), gpt.state_dict()
    if len(set(world.gather_text(source.identity()))) > 1:
        remedy = "give a step-... folder that all of them see"
        raise UserError(f"init_from={path} is not the same checkpoint in all processes: {remedy}")
    stored = read_weights(source, gpt, rows=world.rows(weights))
    with torch.no_grad():
        for name, value in weights.items():
            world.own(value).copy_(stored[name])
    averaged = "" if source.state.average is None else "averaged "
    say(f"beginning with the {averaged}weights of {source.path}")


def find_checkpoint(run_dir: Path, world: World) -> Path | None:
    """The newest whole checkpoint of a run, the same in all processes, or None if it has no checkpoints.

    Raises:
        UserError: none of its checkpoints is whole, or a process cannot see the one that the main process found.
    """
    found = torch.zeros(1, dtype=torch.int64, device=world.device)
    if world.is_main:  # only the main process verifies the files
        path = newest_whole(run_dir, at=world.at)
        found += 0 if path is None else step_of(path) + 1
    step = int(world.sum(found)) - 1
    if step < 0:
        return None
    path = checkpoint_path(run_dir, step)
    seen = world.gather(torch.tensor([float(path.is_dir())], device=world.device))
    if blind := [str(rank) for rank, sees in enumerate(seen) if not sees]:
        raise UserError(f"process {', '.join(blind)} cannot see {path}: put run_dir where all machines see it")
    return path


def restore(
    path: Path,
    fresh: TrainState,
    tensors: Mapping[str, Mapping[str, Tensor]],
    world: World,
    carried: GPTState | None = None,
    rows: slice = slice(None),
) -> tuple[TrainState, GPTState | None]:
    """Load a checkpoint into a run's tensors and random generators, and return its state.

    Args:
        path: a verified checkpoint.
        fresh: the state in which the run would begin.
        tensors: those of "model" and "optimizer", by name.
        carried: with data.carry_state, a state of the model of the size of this process's sequences.
        rows: this process's sequences of the global batch.

    Returns:
        The run's state, and with data.carry_state that of the model after the text so far, of `rows`.

    Raises:
        UserError: the checkpoint belongs to a run with another model or other data.
    """
    checkpoint = open_checkpoint(path, files=())
    state = checkpoint.state
    _check_same_run(path, state, fresh)
    for name, of_run in tensors.items():
        world.at(f"reading {name}")
        expected = {key: (value.shape, (value.dtype,)) for key, value in of_run.items()}
        stored = checkpoint.tensors(name, expected, world.rows(of_run))
        with torch.no_grad():
            for key, value in of_run.items():
                world.own(value).copy_(stored[key])
    world.at("reading random")
    sequences = state.batch_tokens // state.seq_len
    streams: Expected = {
        name: (torch.Size([sequences, *x.shape[1:]]), FLOATS if x.is_floating_point() else [x.dtype])
        for name, (x, _) in tensors_of(carried, "carried")
    }
    saved_states = checkpoint.tensors(
        "random", {**random_tensors(state.processes, state.device), **streams}, dict.fromkeys(streams, rows)
    )
    if (state.processes, state.device) == (world.size, world.device.type):
        set_random_state(saved_states[RANDOM][world.rank], world.device)
    else:  # other processes than before: each gets a new generator
        seed_process(f"{state.seed} {state.step} {world.rank}")
    here = {name: value.to(world.device) for name, value in saved_states.items()}
    return state.model_copy(update={"dataset_dir": fresh.dataset_dir}), restored(carried, here, "carried")


def _check_same_run(path: Path, before: TrainState, now: TrainState) -> None:
    if not before.dataset_fingerprint:
        run_dir = path.parent.parent
        raise UserError(f"run_dir={run_dir} is an imported model: train it with init_from={run_dir} in another run_dir")
    if before.dataset_fingerprint != now.dataset_fingerprint:
        what = f"{path} was trained on {before.dataset_dir}, whose content is not that of dataset_dir={now.dataset_dir}"
        raise UserError(f"{what}: use that dataset, or another run_dir")
    was, wanted = (state.model_dump(mode="json", include={*_KEPT, "optimizer"}) for state in (before, now))
    changed = differences(was, wanted)
    if changed:
        listed = ", ".join(f"{key}={new} (checkpoint: {old})" for key, (old, new) in changed.items())
        raise UserError(f"{path} belongs to another run: {listed}; use the checkpoint's settings, or another run_dir")


def check_folder(run_dir: Path) -> None:
    """Raise UserError if run_dir, which need not exist, is a dataset or a folder of runs."""
    if (run_dir / "checkpoints").exists():
        return
    if (run_dir / "train-00000.bin").exists():
        raise UserError(f"run_dir={run_dir} is a dataset: choose another folder for the run")
    if runs := sorted(run_dir.glob("*/checkpoints")):
        raise UserError(f"run_dir={run_dir} has runs in it, such as {runs[0].parent.name}: choose a folder beside them")


def own_run(run_dir: Path) -> AbstractContextManager[None]:
    """Keep other processes from training in run_dir while the context lasts.

    Raises:
        UserError: another process already trains there. The lock of a dead process does not count.
    """

    def taken() -> str:
        try:
            environment = read_json(run_dir / "config.json")["environment"]
            holder = f"process {environment['pid']} on {environment['host']}"
        except (UserError, KeyError, TypeError):  # it has not written that yet
            holder = "another process"
        return f"run_dir={run_dir} is being trained in by {holder}: wait until it is done, or use another run_dir"

    return owned(run_dir / "run.lock", taken)


def write_config(path: Path, config: dict[str, Any], world: World, found: dict[str, Any], resumed: bool) -> None:
    """Write config.json: the configuration, and the versions, devices and environment that a run's numbers depend on.

    Prints what changed since the run was last started. `found` is what else is known about model and device.
    """
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "git_commit": git_commit(),
        "device": device_name(world.device),
        "processes": world.size,
        "host": platform.node(),
        "pid": os.getpid(),
        **found,
    }
    if resumed:
        line = "changed since this run was last started: {key}={new} (before: {old})"
        say_changes(path, config, line, {key: environment[key] for key in _ROUNDING})
    write_json(path, {"config": config, "environment": environment})


def say_changes(path: Path, config: dict[str, Any], line: str, environment: dict[str, Any]) -> None:
    """Print a line for every setting, and every given part of the environment, that differs from config.json.

    `line` has the places {key}, {new} and {old}.
    """
    try:
        file = read_json(path)
        before = {key: file["environment"][key] for key in environment}
        changes = differences(file["config"], config) | differences(before, environment)
    except (UserError, KeyError, TypeError, AttributeError) as error:  # the file is only a record: no reason to stop
        return warn(f"{path} is damaged: {error}")
    for key, (old, new) in changes.items():
        say(line.format(key=key, new=new, old=old))
