"""Checkpoints: safetensors and JSON, whole or absent.

A checkpoint is a folder `step-00001000` with

    model.safetensors       tensors by parameter name
    optimizer.safetensors   tensors by parameter name
    random.safetensors      the state of every process's random numbers
    state.json              the rest of the run's state: TrainState
    tokenizer.json          so that a checkpoint alone is enough to sample from
    manifest.json           sha256 of each of the others, written last

It is written under another name, synced, and renamed: a crash leaves nothing half-written under a
checkpoint's name. The sums detect later damage, and the previous checkpoint is used. `latest` and
`best` beside the checkpoints are text files that hold a checkpoint's name: a command can be given
them. A run is resumed from the newest checkpoint that is whole.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from common.console import say, warn
from common.files import (
    read_json,
    sha256_file,
    sync_directory,
    write_atomic,
    write_json,
    write_or_warn,
)
from common.settings import Settings, UserError, decode
from data.tokenizers.build import Tokenizer, load_tokenizer, save_tokenizer
from model.gpt import GPT
from runtime.distributed import World
from runtime.state import (
    FORMAT_VERSION,
    RANDOM,
    TrainState,
    random_state,
)
from runtime.tensor_file import Expected, load_tensors, save_file

_delete = partial(shutil.rmtree, ignore_errors=True)
_NAME = re.compile(r"step-\d{8,18}")
_LARGEST_STATE = 2**22  # bytes: it may name the weights of many sets
_FILES = (
    "random.safetensors",
    "state.json",
    "tokenizer.json",
    "model.safetensors",
    "optimizer.safetensors",
)
MODEL_FILES = ("model.safetensors", "state.json", "tokenizer.json")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Tensors = Mapping[str, Mapping[str, Tensor]]
"""For each of "model", "optimizer" and "random", tensors by name."""


class CheckpointConfig(Settings, defaults="train:checkpoint"):
    """When to save, and what to keep."""

    every: int | None = Field(ge=1)
    """Steps between checkpoints; the last step is always saved; null: at the end only."""
    keep_last: int = Field(ge=1)
    """How many of the newest checkpoints to keep, besides the one with the lowest loss."""
    keep_every: int | None = Field(ge=1)
    """Checkpoints at multiples of this step are never deleted; null: none."""


class Damaged(UserError):
    """A checkpoint's files differ from what was written. Another checkpoint may still be intact."""


class Digests(Settings):
    """manifest.json."""

    format_version: int
    sha256: dict[str, str]
    """The sum of every other file, by name."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. The files that were asked for were verified when it was opened."""

    path: Path
    state: TrainState
    sums: Mapping[str, str]
    """The sha256 of each of _FILES."""
    damaged: tuple[Path, ...] = ()
    """Newer checkpoints of the run, which are damaged."""

    @property
    def run_dir(self) -> Path:
        """The run that the checkpoint belongs to, or its own folder if it belongs to none."""
        path = self.path if len(self.path.parts) > 2 else self.path.absolute()
        return path.parent.parent if path.parent.name == "checkpoints" else path

    @property
    def identity(self) -> str:
        """A hex digest of the sums of weights and configuration, which no other model has."""
        described = self.sums["model.safetensors"] + self.sums["state.json"]
        return hashlib.sha256(described.encode()).hexdigest()

    def load_tensors(
        self, name: str, expected: Expected, rows: Mapping[str, slice] | None = None
    ) -> dict[str, Tensor]:
        """Load the tensors of "model", "optimizer" or "random" to the CPU.

        Args:
            rows: what to read of some tensors; the others are read whole.

        Raises:
            UserError: the checkpoint does not hold exactly the expected tensors.
        """
        return load_tensors([self.path / f"{name}.safetensors"], expected, rows)

    def write_result(self, name: str, content: bytes | str) -> None:
        """Write a file into the run directory and print its path.

        Only warns if the directory is read-only.
        """
        path = self.run_dir / name
        if write_or_warn(path, content):
            say(f"written to {path}")


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint after `step`, which need not exist."""
    return run_dir / "checkpoints" / f"step-{step:08}"


def find_newest(run_dir: Path) -> Path | None:
    """The run's checkpoint with the highest step, whole or not, or None."""
    checkpoints = _all(run_dir)
    return checkpoints[-1] if checkpoints else None


def _all(run_dir: Path) -> list[Path]:
    """The run's checkpoints, by step."""
    folder = run_dir / "checkpoints"
    inside = folder.iterdir() if folder.is_dir() else ()
    checkpoints = [path for path in inside if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(checkpoints, key=_step_of)


def _step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def _first_line(path: Path) -> str:
    with open(path, "rb") as file:
        return file.read(100).decode(errors="replace").strip()


# Reading


def open_checkpoint(
    path: str | Path, files: Collection[str] = _FILES, key: str = "checkpoint"
) -> Checkpoint:
    """Open a run's newest whole checkpoint, the one at `path`, or the one that `latest` names.

    Args:
        files: what to verify.
        key: the setting that names it, for errors.

    Raises:
        UserError: there is no checkpoint, one of `files` is missing or damaged, or it has another
            format version.
    """
    # A run directory, a checkpoint in it, or a file that names one?
    path = Path(path).expanduser()
    if path.name == "checkpoints" and path.is_dir():
        path = path.parent
    if not path.exists():
        remedy = "give a run directory, or a checkpoint in it"
        if key == "init_from":
            remedy += "; scripts/import_gpt2.py makes one of GPT-2's weights"
            remedy += ", and the same command again resumes a run"
        raise UserError(f"{key}={path} does not exist: {remedy}")
    if path.is_file():
        name = _first_line(path)
        if not _NAME.fullmatch(name):
            raise UserError(
                f"{key}={path} does not name a checkpoint: "
                "give a run directory or a step-... folder"
            )
        path = path.parent / name
    # A checkpoint is opened as it is; of a run, the newest that is whole.
    if (path / "train-00000.bin").exists():
        raise UserError(
            f"{key}={path} is a dataset: give the directory of a run that was trained on it"
        )
    if (path / "manifest.json").is_file() or _NAME.fullmatch(path.name):
        return _open(path, files)
    checkpoint = open_newest(path, files)
    if checkpoint is None:
        runs = sorted(str(folder.parent) for folder in path.glob("*/checkpoints"))
        remedy = f"such as {runs[0]}" if runs else "or a step-... folder"
        raise UserError(f"{key}={path} holds no checkpoint: give a run directory, {remedy}")
    return checkpoint


def open_newest(run_dir: Path, files: Collection[str] = _FILES) -> Checkpoint | None:
    """The run's newest checkpoint whose `files` match their sums; None: the run has none.

    Warns about damaged checkpoints.

    Raises:
        UserError: there are checkpoints, but none is whole.
    """
    damaged: list[Path] = []
    for path in reversed(_all(run_dir)):
        try:
            return replace(_open(path, files), damaged=tuple(damaged))
        except Damaged as error:
            warn(f"{error}; falling back to the previous checkpoint")
            damaged.append(path)
    if damaged:
        raise UserError(
            f"none of the {len(damaged)} checkpoints in {run_dir / 'checkpoints'} is whole: "
            "restore one from a copy, or use another run_dir; nothing was changed"
        )
    return None


def _open(path: Path, files: Collection[str]) -> Checkpoint:
    """Open the checkpoint in a folder, and compare some of its files with their sums.

    Raises:
        Damaged: a file is missing or differs, or the manifest is not whole.
        UserError: it has another format version, or settings that are not allowed.
    """
    sums = _read_sums(path)
    for name in files:
        try:
            sha256 = sha256_file(path / name)
        except (OSError, UserError) as error:
            # Other errors may pass, or a person can fix them; EIO means a damaged disk.
            if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.EIO):
                raise
            raise Damaged(f"{path / name} is missing or damaged: {error}") from None
        if sha256 != sums[name]:
            raise Damaged(f"{path / name} is missing or damaged: its sha256 is not the manifest's")
    state = read_json(path / "state.json", limit=_LARGEST_STATE)
    try:
        return Checkpoint(path, decode(TrainState, state), sums)
    except UserError as error:
        raise UserError(f"{path / 'state.json'}: {error}") from None


def _read_sums(path: Path) -> dict[str, str]:
    """The sum of each of _FILES, from a checkpoint's manifest."""
    try:
        manifest = decode(Digests, read_json(path / "manifest.json", limit=_LARGEST_STATE))
    except UserError as error:
        raise Damaged(f"{path / 'manifest.json'} is damaged: {error}") from None
    version = manifest.format_version
    if version != FORMAT_VERSION:
        mismatch = f"{path} has format version {version}; this program reads {FORMAT_VERSION}"
        if _version_of_state(path) == version:
            raise UserError(
                f"{mismatch}: use the commit that the run's config.json names, or another run_dir"
            )
        raise Damaged(mismatch)
    if set(manifest.sha256) != set(_FILES):
        raise Damaged(f"{path / 'manifest.json'} is damaged: it must list {', '.join(_FILES)}")
    return manifest.sha256


def _version_of_state(path: Path) -> object:
    """The format version in state.json; None: that file is damaged, too."""
    with contextlib.suppress(UserError, AttributeError):
        return read_json(path / "state.json", limit=_LARGEST_STATE).get("format_version")
    return None


def load_model(path: str | Path | Checkpoint) -> tuple[GPT, Tokenizer]:
    """Load model and tokenizer from a run's newest checkpoint, or from the checkpoint at `path`.

    Raises:
        UserError: there is no checkpoint, a file is damaged, or the tokenizer has more ids than the
            model.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path, MODEL_FILES)
    state = checkpoint.state
    tokenizer = load_tokenizer(checkpoint.path / "tokenizer.json")
    with torch.device("meta"):
        gpt = GPT(state.model, state.data.reset_at(tokenizer.eot_id))
    gpt.load_state_dict(load_weights(checkpoint, gpt), assign=True)
    if tokenizer.n_vocab > gpt.config.n_vocab:
        raise UserError(
            f"{checkpoint.path} has a tokenizer with {tokenizer.n_vocab} ids, but the model has "
            f"only {gpt.config.n_vocab}: use another checkpoint"
        )
    return gpt.requires_grad_(), tokenizer


def load_weights(
    checkpoint: Checkpoint, gpt: GPT, rows: Mapping[str, slice] | None = None
) -> dict[str, Tensor]:
    """Read the weights of `gpt` from a checkpoint of such a model, by name.

    Args:
        rows: what to read of some weights; the others are read whole.
    """
    expected: Expected = {name: (value.shape, FLOATS) for name, value in gpt.state_dict().items()}
    return checkpoint.load_tensors("model", expected, rows)


# Writing


def save_checkpoint(
    run_dir: Path, tensors: Tensors, state: TrainState, tokenizer: Tokenizer
) -> Path:
    """Write a checkpoint of contiguous tensors on the CPU. An error leaves earlier ones unchanged.

    Raises:
        OSError: it cannot be written.
    """
    path = checkpoint_path(run_dir, state.step)
    temp_dir = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in (run_dir, run_dir.absolute().parent):
            sync_directory(folder)
        _delete(temp_dir)
        temp_dir.mkdir()
        # Each file is on disk before the manifest has its sum, and all of them before the rename.
        for name, file_tensors in tensors.items():
            save_file(dict(file_tensors), temp_dir / f"{name}.safetensors")
        save_tokenizer(tokenizer, temp_dir / "tokenizer.json")
        write_json(temp_dir / "state.json", state.model_dump(mode="json"))
        sums = {file: sha256_file(temp_dir / file) for file in _FILES}
        manifest = Digests(format_version=FORMAT_VERSION, sha256=sums).model_dump()
        write_json(temp_dir / "manifest.json", manifest)  # which also syncs the names in its folder
        # The checkpoint appears under its name at once.
        if path.exists():  # it is damaged
            _remove(path)
        os.rename(temp_dir, path)
        sync_directory(path.parent)
    except OSError:
        _delete(temp_dir)  # makes room on a full disk
        raise
    return path


def delete_old_checkpoints(
    run_dir: Path, state: TrainState, config: CheckpointConfig, damaged: Iterable[Path] = ()
) -> None:
    """Update `latest` and `best`, and delete old and `damaged` checkpoints, and leftovers.

    Keeps the best checkpoint, the newest config.keep_last, and those of every config.keep_every-th
    step.

    Args:
        state: of the newest whole checkpoint.
    """
    folder = run_dir / "checkpoints"
    paths = _all(run_dir)
    for leftover in folder.glob("*.tmp"):
        _delete(leftover)
    whole = [path for path in paths if path not in damaged]
    best = None if state.best_step is None else checkpoint_path(run_dir, state.best_step)
    if best not in whole and (folder / "best").is_file():
        best = folder / _first_line(folder / "best")  # that save failed: keep the one before it
    _point(folder / "latest", whole[-1])
    retained = set(whole[-config.keep_last :])
    if best in whole:
        _point(folder / "best", best)
        retained.add(best)
    if config.keep_every is not None:
        retained |= {path for path in whole if _step_of(path) % config.keep_every == 0}
    for path in paths:
        if path not in retained:
            _remove(path)


def _point(pointer: Path, path: Path) -> None:
    if not pointer.is_file() or _first_line(pointer) != path.name:
        write_atomic(pointer, path.name + "\n")


def _remove(path: Path) -> None:
    """Delete a checkpoint. A crash leaves it whole, or as leftovers for the next save to delete."""
    leftover = path.with_name(path.name + ".old.tmp")
    _delete(leftover)
    os.rename(path, leftover)
    _delete(leftover)


class Saver:
    """Saves in the background: training waits while tensors are copied, not while they are written.

    A thread of the main process writes one checkpoint at a time; the next save waits for it.
    """

    def __init__(
        self,
        run_dir: Path,
        tokenizer: Tokenizer,
        config: CheckpointConfig,
        world: World,
        resumed: Checkpoint | None,
    ) -> None:
        """Prepare to save.

        Args:
            resumed: the checkpoint from which the run continues.
        """
        self._run_dir = run_dir
        self._tokenizer = tokenizer
        self._config = config
        self._world = world
        # Reused: copying into new memory takes 30 times as long.
        self._copies: dict[str, dict[str, Tensor]] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._damaged = set(resumed.damaged) if resumed else set()
        self._step = 0
        """The step of the save that was started last."""
        self.saved_step = resumed.state.step if resumed else None
        """The step of the newest checkpoint; None while it is written, and if that failed."""

    def save(self, tensors: Tensors, state: TrainState) -> None:
        """Copy all tensors, on any device, and start to write them. Every process must call this.

        Args:
            tensors: those of "model" and "optimizer". Sharded ones are gathered one by one, so that
                no process but the main one holds more than one of them at a time.

        Raises:
            UserError: the previous save failed; see `check`.
        """
        self.wait()
        self.check()
        world = self._world
        # Every process has random numbers of its own.
        random = torch.stack(world.gather(random_state(world.device).to(world.device)))
        for file, named in {**tensors, "random": {RANDOM: random}}.items():
            copies = self._copies.setdefault(file, {})
            for name, value in named.items():
                whole = world.unshard(value)
                if world.is_main:
                    if name not in copies:
                        copies[name] = torch.empty(
                            whole.shape, dtype=whole.dtype, pin_memory=whole.is_cuda
                        )
                    copies[name].copy_(whole.detach(), non_blocking=True)
                del whole  # before the next is gathered
        if not world.is_main:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # finishes the copies into pinned memory
        # The thread writes the copies while training continues.
        state = state.model_copy(update={"processes": world.size, "device": world.device.type})
        self._step = state.step
        self.saved_step = None
        self._thread = threading.Thread(
            target=self._write, args=(state,), name="saver", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise UserError if the last save failed."""
        error = self._error
        self._error = None
        if error is None:
            return
        if not isinstance(error, OSError):
            raise error
        raise UserError(
            f"the save after step {self._step} failed ({error.strerror or error}); "
            "earlier checkpoints are whole: fix that, and run the same command again"
        )

    def wait(self) -> None:
        """Wait until nothing is being written, even if the save fails."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, state: TrainState) -> None:
        try:
            # The checkpoint relies on the lines that the run has written.
            with open(self._run_dir / "metrics.jsonl", "rb") as log:
                os.fsync(log.fileno())
            path = save_checkpoint(self._run_dir, self._copies, state, self._tokenizer)
            self._damaged.discard(path)
            delete_old_checkpoints(self._run_dir, state, self._config, self._damaged)
            self._damaged.clear()
            self.saved_step = state.step
        except BaseException as error:  # `check` raises it
            self._error = error
