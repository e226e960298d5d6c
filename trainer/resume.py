"""Continues a run from its newest whole checkpoint, or refuses another model or other data."""

from pathlib import Path

import torch

from common.command_line import format_changes
from common.settings import UserError, find_differences
from runtime.checkpoint import Checkpoint, Tensors, open_checkpoint, open_newest
from runtime.distributed import World
from runtime.state import (
    RANDOM,
    FixedSettings,
    TrainState,
    random_tensors,
    seed_process,
    set_random_state,
)


def open_newest_for_all(run_dir: Path, world: World) -> Checkpoint | None:
    """The newest whole checkpoint of a run, the same in all processes; None: it has none.

    Raises:
        UserError: none of its checkpoints is whole, or not all processes see the one that the main
            process found.
    """
    checkpoint = open_newest(run_dir) if world.is_main else None
    name = world.exchange(checkpoint and checkpoint.path.name)[0]
    if name is not None:
        path = run_dir / "checkpoints" / name
        if not world.is_main and path.exists():
            checkpoint = open_checkpoint(path, files=())  # the main process has verified it
        seen = checkpoint and checkpoint.identity
        world.check_equal({"the checkpoint in run_dir, which all machines must see": seen})
    return checkpoint


def load_run(
    checkpoint: Checkpoint, fresh: TrainState, tensors: Tensors, world: World
) -> TrainState:
    """Load a checkpoint into a run's tensors and random generators, and return its state.

    Args:
        fresh: the state in which the run would start.
        tensors: those of "model" and "optimizer".

    Raises:
        UserError: the checkpoint belongs to a run with another model or other data.
    """
    state = checkpoint.state
    _check_same_run(checkpoint.path, state, fresh)
    for file, run_tensors in tensors.items():
        expected = {name: (value.shape, (value.dtype,)) for name, value in run_tensors.items()}
        stored = checkpoint.load_tensors(file, expected, world.rows(run_tensors))
        with torch.no_grad():
            for name, value in run_tensors.items():
                world.local(value).copy_(stored[name])
    expected_states = random_tensors(state.processes, state.device)
    random_states = checkpoint.load_tensors("random", expected_states)[RANDOM]
    if (state.processes, state.device) == (world.size, world.device.type):
        set_random_state(random_states[world.rank], world.device)
    else:  # other processes than before: each gets a new generator
        seed_process(f"{state.seed} {state.step} {world.rank}")
    return state.model_copy(update={"dataset_dir": fresh.dataset_dir})


def _check_same_run(path: Path, before: TrainState, now: TrainState) -> None:
    if not before.dataset_fingerprint:
        run_dir = path.parent.parent
        raise UserError(
            f"run_dir={run_dir} is an imported model: train it with init_from={run_dir} in "
            "another run_dir"
        )
    if before.dataset_fingerprint != now.dataset_fingerprint:
        raise UserError(
            f"{path} was trained on {before.dataset_dir}, whose content is not that of "
            f"dataset_dir={now.dataset_dir}: use that dataset, or another run_dir"
        )
    fixed = {*FixedSettings.model_fields, "optimizer"}
    changed = find_differences(
        before.model_dump(mode="json", include=fixed), now.model_dump(mode="json", include=fixed)
    )
    if changed:
        listed = ", ".join(format_changes(changed, "checkpoint:"))
        raise UserError(
            f"{path} belongs to another run: {listed}; use the checkpoint's settings, or another "
            "run_dir"
        )
