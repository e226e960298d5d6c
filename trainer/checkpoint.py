"""Checkpoints: safetensors and JSON, whole or absent.

A checkpoint is a folder `step-00001000` with

    model.safetensors optimizer.safetensors    tensors by parameter name
    state.json                                 what else the run must remember: TrainState
    tokenizer.json                             so that a checkpoint alone is enough to sample from
    manifest.json                              sha256 of each of the others, written last

It is written under another name, synced, and renamed: whatever has a checkpoint's name is whole. `latest` and `best`
beside the checkpoints are text files that hold a checkpoint's name.
"""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.console import say, warn
from common.files import read_json, sha256_file, sync_directory, write_atomic, write_json
from common.settings import Settings, UserError, decode
from data.mixture import DataConfig
from data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from model.gpt import GPT, GPTConfig

FORMAT_VERSION = 1
_NAME = re.compile(r"step-\d{8,}")
_FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json")


class TrainState(Settings):
    """What a run must remember besides its tensors."""

    format_version: int = FORMAT_VERSION
    step: int = Field(ge=0)
    """Steps done."""
    best_val_loss: float | None = None
    """Lowest validation loss so far, nats per token."""
    best_step: int | None = None
    """The step that it was measured after, whose checkpoint is kept."""
    run_id: str
    """Name of the run for trackers, kept when it is resumed."""
    model: GPTConfig
    seed: int
    seq_len: int
    batch_tokens: int
    data: DataConfig = DataConfig()
    dataset_dir: Path
    dataset_fingerprint: str


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    state: TrainState

    @property
    def run_dir(self) -> Path:
        """The run that it belongs to; its own folder, if it stands alone."""
        path = self.path if len(self.path.parts) > 2 else self.path.absolute()
        return path.parent.parent if path.parent.name == "checkpoints" else path

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one of its files, "model" or "optimizer", on the CPU.

        Raises:
            UserError: the file is missing, or not what the manifest says.
        """
        file = self.path / f"{name}.safetensors"
        _verify(self.path, file.name)
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {file}: {error}") from None

    def leave(self, name: str, text: str) -> None:
        """Write a file for the run's owner, and say where; a run that is read-only is no reason to fail."""
        path = self.run_dir / name
        try:
            write_atomic(path, text)
        except OSError as error:
            warn(f"{path} was not written: {error.strerror}")
        else:
            say(f"written to {path}")


def checkpoints_dir(run_dir: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_dir / "checkpoints"


def newest(run_dir: Path) -> Path | None:
    """The run's checkpoint of the highest step, or None."""
    return next(reversed(_all(run_dir)), None)


def _all(run_dir: Path) -> list[Path]:
    """The run's checkpoints, by step."""
    folder = checkpoints_dir(run_dir)
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the newest checkpoint of a run directory, or the one at `path`: its folder, or `latest` or `best`.

    Raises:
        UserError: there is none, or its state is missing or not what its manifest says.
    """
    path = Path(path)
    if path.is_file():
        name = path.read_text(encoding="utf-8", errors="replace").strip()
        if not _NAME.fullmatch(name):
            raise UserError(f"checkpoint={path} does not name a checkpoint: give a run directory or a folder step-...")
        path = path.parent / name
    elif not (path / "manifest.json").is_file():
        found = newest(path)
        if found is None:
            raise UserError(f"checkpoint={path} holds no checkpoint: give a run directory or a folder step-...")
        path = found
    _verify(path, "state.json")
    state = read_json(path / "state.json")
    if isinstance(state, dict) and state.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{path} has format version {state.get('format_version')}; this program reads {FORMAT_VERSION}")
    return Checkpoint(path, decode(TrainState, state))


def load_model(path: str | Path | Checkpoint) -> tuple[GPT, Tokenizer]:
    """The model and the tokenizer of a run directory's newest checkpoint, or of the checkpoint at `path`."""
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    with torch.device("meta"):
        gpt = GPT(checkpoint.state.model)
    load_weights(gpt, checkpoint, assign=True)
    _verify(checkpoint.path, "tokenizer.json")
    return gpt.requires_grad_(), load_tokenizer(checkpoint.path / "tokenizer.json")


def load_weights(gpt: GPT, checkpoint: Checkpoint, assign: bool = False) -> None:
    """Put the checkpoint's weights into a model of its architecture."""
    try:
        gpt.load_state_dict(checkpoint.tensors("model"), assign=assign)
    except RuntimeError as error:
        raise UserError(f"{checkpoint.path} does not hold this architecture's weights: {error}") from None


def save_checkpoint(
    run_dir: Path, model: dict[str, Tensor], optimizer: dict[str, Tensor], state: TrainState, tokenizer: Tokenizer
) -> Path:
    """Write a checkpoint; afterwards it is the newest, or, after a crash, the earlier ones are as they were."""
    folder = checkpoints_dir(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{state.step:08}"
    beside = path.with_name(path.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()

    _write_synced(beside / "model.safetensors", lambda file: save_file(_contiguous(model), file))
    _write_synced(beside / "optimizer.safetensors", lambda file: save_file(_contiguous(optimizer), file))
    save_tokenizer(tokenizer, beside / "tokenizer.json")
    write_json(beside / "state.json", state.model_dump(mode="json"))
    sums = {name: sha256_file(beside / name) for name in _FILES}
    write_json(beside / "manifest.json", {"format_version": FORMAT_VERSION, "sha256": sums})

    if path.exists():  # a run that was resumed from before this step comes here again
        _remove(path)
    os.rename(beside, path)
    sync_directory(folder)
    write_atomic(folder / "latest", path.name + "\n")
    if state.best_step is not None:
        write_atomic(folder / "best", f"step-{state.best_step:08}\n")
    return path


def retain(run_dir: Path, keep_last: int) -> None:
    """Delete all checkpoints but the newest `keep_last` and the best, and what crashed saves left behind."""
    folder = checkpoints_dir(run_dir)
    best = folder / "best"
    keep = {best.read_text(encoding="utf-8").strip()} if best.exists() else set()
    for path in _all(run_dir)[:-keep_last]:
        if path.name not in keep:
            _remove(path)
    for leftover in folder.glob("step-*.tmp"):
        shutil.rmtree(leftover)


def _remove(path: Path) -> None:
    """Delete a checkpoint; a crash leaves it whole, or not under a checkpoint's name."""
    doomed = path.with_name(path.name + ".old.tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _verify(path: Path, name: str) -> None:
    """Check one of a checkpoint's files against its manifest."""
    manifest: Any = read_json(path / "manifest.json")
    sums = manifest.get("sha256") if isinstance(manifest, dict) else None
    if not isinstance(sums, dict) or set(sums) != set(_FILES):
        raise UserError(f"{path / 'manifest.json'} is damaged: it must list {', '.join(_FILES)}")
    if not (path / name).is_file() or sha256_file(path / name) != sums[name]:
        raise UserError(
            f"{path / name} is missing or damaged: its sha256 is not the manifest's; use another checkpoint "
            f"(train.py continues from the one before if you delete {path})"
        )


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def _write_synced(path: Path, write: Callable[[Path], None]) -> None:
    write(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
