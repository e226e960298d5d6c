"""What a run begins with: its newest checkpoint, or the weights of another run."""

import secrets
from pathlib import Path

import torch

from common.console import say
from common.settings import UserError, differences
from data.shards import Manifest
from data.tokenizer import Tokenizer, load_tokenizer
from model.gpt import GPT, GPTConfig
from trainer.checkpoint import Checkpoint, Tensors, open_checkpoint, open_model, open_newest, read_weights
from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.randomness import RANDOM, random_tensors, seed_process, set_random_state
from trainer.state import FixedSettings, TrainState

_FIXED = set(FixedSettings.model_fields)


def new_state(config: TrainConfig, manifest: Manifest) -> TrainState:
    """The state of a run before its first step."""
    return TrainState(
        optimizer=config.optim.name,
        step=0,
        run_id=secrets.token_hex(4),
        dataset_dir=config.dataset_dir.absolute(),
        dataset_fingerprint=manifest.fingerprint,
        **{name: getattr(config, name) for name in _FIXED},
    )


def find_checkpoint(run_dir: Path, world: World) -> Checkpoint | None:
    """The newest whole checkpoint of a run, the same in all processes, or None if it has no checkpoints.

    Raises:
        UserError: none of its checkpoints is whole, or this process does not see the one that the main process found.
    """
    world.at(f"reading the checkpoints of {run_dir}")
    found = open_newest(run_dir) if world.is_main else None
    name = world.gather_text(found.path.name if found else "")[0]
    if world.is_main or not name:
        return found
    path = run_dir / "checkpoints" / name
    try:
        return open_checkpoint(path, files=())  # the main process has verified it
    except UserError as error:
        why = f"process {world.rank} cannot see {path} as the main process does ({error})"
        raise UserError(f"{why}: put run_dir where all machines see it") from None


def restore(checkpoint: Checkpoint, fresh: TrainState, tensors: Tensors, world: World) -> TrainState:
    """Load a checkpoint into a run's tensors and random generators, and return its state.

    Args:
        fresh: the state in which the run would begin.
        tensors: those of "model" and "optimizer".

    Raises:
        UserError: the checkpoint belongs to a run with another model or other data.
    """
    state = checkpoint.state
    _check_same_run(checkpoint.path, state, fresh)
    for file, of_run in tensors.items():
        world.at(f"reading {file}")
        expected = {name: (value.shape, (value.dtype,)) for name, value in of_run.items()}
        stored = checkpoint.tensors(file, expected, world.rows(of_run))
        with torch.no_grad():
            for name, value in of_run.items():
                world.local(value).copy_(stored[name])
    saved_states = checkpoint.tensors("random", random_tensors(state.processes, state.device))[RANDOM]
    if (state.processes, state.device) == (world.size, world.device.type):
        set_random_state(saved_states[world.rank], world.device)
    else:  # other processes than before: each gets a new generator
        seed_process(f"{state.seed} {state.step} {world.rank}")
    return state.model_copy(update={"dataset_dir": fresh.dataset_dir})


def _check_same_run(path: Path, before: TrainState, now: TrainState) -> None:
    if not before.dataset_fingerprint:
        run_dir = path.parent.parent
        raise UserError(f"run_dir={run_dir} is an imported model: train it with init_from={run_dir} in another run_dir")
    if before.dataset_fingerprint != now.dataset_fingerprint:
        what = f"{path} was trained on {before.dataset_dir}, whose content is not that of dataset_dir={now.dataset_dir}"
        raise UserError(f"{what}: use that dataset, or another run_dir")
    was, wanted = (state.model_dump(mode="json", include={*_FIXED, "optimizer"}) for state in (before, now))
    if changed := differences(was, wanted):
        listed = ", ".join(f"{key}={new} (checkpoint: {old})" for key, (old, new) in changed.items())
        raise UserError(f"{path} belongs to another run: {listed}; use the checkpoint's settings, or another run_dir")


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
    if changed := differences(source.state.model.model_dump(mode="json"), config.model_dump(mode="json")):
        listed = ", ".join(f"model.{key}={old} (here: {new})" for key, (old, new) in changed.items())
        remedy = f"give the experiment or the model settings of {source.run_dir}"
        raise UserError(f"init_from={path} has another model: {listed}; {remedy}")
    return source


def take_weights(gpt: GPT, path: Path, tokenizer: Tokenizer, world: World) -> None:
    """Give the model the weights of the checkpoint init_from=path, the averaged ones if it has them.

    Raises:
        UserError: as `open_source`; or the processes do not all find the same checkpoint.
    """
    world.at(f"reading init_from={path}")
    source, weights = open_source(path, gpt.config, tokenizer), gpt.state_dict()
    world.check_same(source.identity(), f"init_from={path}")
    stored = read_weights(source, gpt, rows=world.rows(weights))
    with torch.no_grad():
        for name, value in weights.items():
            world.local(value).copy_(stored[name])
    averaged = "" if source.state.average is None else "averaged "
    say(f"beginning with the {averaged}weights of {source.path}")
