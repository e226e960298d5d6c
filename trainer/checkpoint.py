"""Checkpoints: safetensors and JSON, whole or absent.

A checkpoint is a folder `step-00001000` with

    model.safetensors optimizer.safetensors    tensors by parameter name, or parts of them, one of each process:
                                               model-00001-of-00004.safetensors has the first rows of every tensor;
                                               averaged weights are in the model's, as average/NAME
    random.safetensors                         the state of every process's random numbers
    state.json                                 the rest of the run's state: TrainState
    tokenizer.json                             so that a checkpoint alone is enough to sample from
    manifest.json                              sha256 of each of the others, written last

It is written under another name, synced, and renamed: a crash leaves nothing half-written under a checkpoint's name.
Where every process writes a part, the main process writes the manifest when it has the sums of all parts.
The sums detect later damage, and the previous checkpoint is used. `latest` and `best` beside the checkpoints are
text files that hold a checkpoint's name, for people; a run is resumed from the newest checkpoint that is whole.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from common.console import say, warn
from common.files import read_json, sha256_file, sync_directory, write_atomic, write_json
from common.settings import Settings, UserError, decode
from data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from model.gpt import GPT
from trainer.average import AVERAGE
from trainer.state import FORMAT_VERSION, TrainState
from trainer.tensor_file import Expected, read_tensors, save_file

_NAME = re.compile(r"step-\d{8,18}")
_LARGEST_STATE = 2**22  # bytes: it may name the weights of many sets
_IN_PARTS = ("model.safetensors", "optimizer.safetensors")
_FILES = (*_IN_PARTS, "random.safetensors", "state.json", "tokenizer.json")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Tensors = Mapping[str, Mapping[str, Tensor]]
"""For each of "model", "optimizer" and "random", tensors by name."""


class Damaged(UserError):
    """A checkpoint's files differ from what was written. Another checkpoint may still be intact."""


class Digests(Settings):
    """manifest.json."""

    format_version: int
    sha256: dict[str, str]
    """The sum of every other file, by name."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    path: Path
    state: TrainState

    @property
    def run_dir(self) -> Path:
        """The run that the checkpoint belongs to, or its own folder if it belongs to none."""
        path = self.path if len(self.path.parts) > 2 else self.path.absolute()
        return path.parent.parent if path.parent.name == "checkpoints" else path

    def identity(self, average: bool = True) -> str:
        """A hex digest of the sums of weights and configuration, which no other model has."""
        sums, averaged = _sums(self.path), average and self.state.average is not None
        found = json.dumps([sums["model.safetensors"], sums["state.json"], averaged])
        return hashlib.sha256(found.encode()).hexdigest()

    def tensors(self, name: str, expected: Expected, rows: Mapping[str, slice] | None = None) -> dict[str, Tensor]:
        """The tensors of "model", "optimizer" or "random", on the CPU.

        Args:
            rows: what to read of some tensors; the others are read whole.

        Raises:
            UserError: the checkpoint does not hold exactly the expected tensors.
        """
        files = _sums(self.path)[f"{name}.safetensors"]
        return read_tensors([self.path / file for file in files], expected, rows)

    def write_result(self, name: str, content: bytes | str) -> None:
        """Write a file into the run directory and print its path. Only warns if the directory is read-only."""
        path = self.run_dir / name
        try:
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, content)
        except OSError as error:
            warn(f"{path} was not written: {error.strerror}")
        else:
            say(f"written to {path}")


def checkpoints_dir(run_dir: Path) -> Path:
    """The folder of a run's checkpoints."""
    return run_dir / "checkpoints"


def newest(run_dir: Path) -> Path | None:
    """The run's checkpoint with the highest step, whole or not, or None."""
    return next(reversed(_all(run_dir)), None)


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint after `step`, which need not exist."""
    return checkpoints_dir(run_dir) / f"step-{step:08}"


def newest_whole(
    run_dir: Path, files: Collection[str] = _FILES, at: Callable[[str], None] = lambda place: None
) -> Path | None:
    """The run's newest checkpoint whose `files` match their sums, or None if the run has no checkpoints.

    Warns about damaged checkpoints. Calls `at` with the name of each file that it reads.

    Raises:
        UserError: there are checkpoints, but none is whole.
    """
    paths = _all(run_dir)
    for path in reversed(paths):
        try:
            _verify(path, files, at)
        except Damaged as error:
            warn(f"{error}; using the checkpoint before it, if there is one")
        else:
            return path
    if paths:
        what = f"none of the {len(paths)} checkpoints in {checkpoints_dir(run_dir)} is whole"
        raise UserError(f"{what}: restore one from a copy, or use another run_dir; nothing was changed")
    return None


def _all(run_dir: Path) -> list[Path]:
    """The run's checkpoints, by step."""
    folder = checkpoints_dir(run_dir)
    inside = folder.iterdir() if folder.is_dir() else ()
    found = (path for path in inside if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink())
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def open_checkpoint(path: str | Path, files: Collection[str] = _FILES, key: str = "checkpoint") -> Checkpoint:
    """Open a run directory's newest whole checkpoint, the checkpoint at `path`, or the one that a file `latest` names.

    Args:
        key: the setting that names it, for errors.

    Raises:
        UserError: there is no checkpoint, one of `files` is missing or damaged, or it has another format version.
    """
    path = Path(path)
    if path.name == "checkpoints" and path.is_dir():
        path = path.parent
    if not path.exists():
        raise UserError(f"{key}={path} does not exist: give a run directory, or a checkpoint in it")
    if path.is_file():
        name = _first_line(path)
        if not _NAME.fullmatch(name):
            raise UserError(f"{key}={path} does not name a checkpoint: give a run directory or a step-... folder")
        path = path.parent / name
    elif (path / "train-00000.bin").exists():
        raise UserError(f"{key}={path} is a dataset: give the directory of a run that was trained on it")
    elif not ((path / "manifest.json").is_file() or _NAME.fullmatch(path.name)):
        found = newest_whole(path, files)
        if found is None:
            raise UserError(f"{key}={path} holds no checkpoint{_what_it_is(path)}")
        return _opened(found)
    _verify(path, files)
    return _opened(path)


def _what_it_is(path: Path) -> str:
    """Say what a folder without checkpoints seems to be, and what to give."""
    if (path / "model.safetensors").exists():
        return ", but a model for other programs: give the run that it was exported from (import_gpt2.py reads GPT-2)"
    runs = sorted(str(folder.parent) for folder in path.glob("*/checkpoints"))
    return f" itself: give a run in it, such as {runs[0]}" if runs else ": give a run directory or a step-... folder"


def _first_line(path: Path) -> str:
    with open(path, "rb") as file:
        return file.read(100).decode(errors="replace").strip()


def _opened(path: Path) -> Checkpoint:
    state = read_json(path / "state.json", limit=_LARGEST_STATE)
    try:
        return Checkpoint(path, decode(TrainState, state))
    except UserError as error:
        raise UserError(f"{path / 'state.json'}: {error}") from None


def load_model(path: str | Path | Checkpoint, average: bool = True) -> tuple[GPT, Tokenizer]:
    """Load model and tokenizer from the newest checkpoint of a run directory, or from the checkpoint at `path`.

    Args:
        average: load the averaged weights, if the run has them.

    Raises:
        UserError: there is no checkpoint, a file is damaged, or the tokenizer has more ids than the model.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_model(path)
    state, tokenizer = checkpoint.state, load_tokenizer(checkpoint.path / "tokenizer.json")
    with torch.device("meta"):
        gpt = GPT(state.model, state.data.reset_at(tokenizer.eot_id))
    gpt.load_state_dict(read_weights(checkpoint, gpt, average), assign=True)
    if tokenizer.n_vocab > gpt.config.n_vocab:
        ids = f"{tokenizer.n_vocab} ids, but the model has only {gpt.config.n_vocab}"
        raise UserError(f"{checkpoint.path} has a tokenizer with {ids}: use another checkpoint")
    return gpt.requires_grad_(), tokenizer


def read_weights(
    checkpoint: Checkpoint, gpt: GPT, average: bool = True, rows: Mapping[str, slice] | None = None
) -> dict[str, Tensor]:
    """Read the weights of `gpt` from a checkpoint of such a model, or some `rows` of them, by name.

    Args:
        average: read the averaged weights, if the run has them.
    """
    expected: Expected = {name: (value.shape, FLOATS) for name, value in gpt.state_dict().items()}
    has_average = checkpoint.state.average is not None
    averages = {name: AVERAGE + name for name, _ in gpt.named_parameters() if has_average}
    rows = rows or {}
    tensors = checkpoint.tensors(
        "model",
        {**expected, **{key: expected[name] for name, key in averages.items()}},
        {**rows, **{key: rows[name] for name, key in averages.items() if name in rows}},
    )
    return {name: tensors[averages.get(name, name) if average else name] for name in expected}


def open_model(path: str | Path, key: str = "checkpoint") -> Checkpoint:
    """Like `open_checkpoint`, but verify only the files needed to run the model."""
    return open_checkpoint(path, ("model.safetensors", "state.json", "tokenizer.json"), key)


def save_checkpoint(
    run_dir: Path,
    tensors: Tensors,
    state: TrainState,
    tokenizer: Tokenizer,
    before: Callable[[], None] = lambda: None,
    rank: int = 0,
    exchange: Callable[[str], list[str]] = lambda text: [text],
) -> Path:
    """Write a checkpoint. A crash or an error leaves earlier checkpoints unchanged.

    Several processes may write one together: all call this at the same time, and an error in one is an error in all.

    Args:
        tensors: on the CPU, contiguous. Each process passes its rows of model and optimizer;
            ranks hold consecutive rows.
        before: is called before anything is written. Its errors are those of the save.
        rank: of this process; 0 writes all but the parts of others.
        exchange: from the text of each process, the texts of all, by rank.

    Raises:
        OSError, SafetensorError: the checkpoint cannot be written.
    """
    path = checkpoint_path(run_dir, state.step)
    beside = path.with_name(path.name + ".tmp")

    def begin() -> None:
        before()
        if rank == 0:
            _make_folder(beside)

    def finish() -> None:
        if rank == 0:
            _write_rest(beside, tensors, state, tokenizer, sums)
            old = _aside(path)
            if path.exists():  # it is damaged
                os.rename(path, old)
            os.rename(beside, path)
            sync_directory(path.parent)
            _clear(old)

    try:
        count = len(_together(exchange, begin))
        sums = _together(exchange, lambda: _write_part(beside, tensors, rank, count))
        _together(exchange, finish)
    except (OSError, SafetensorError):
        if rank == 0:
            _clear(beside)  # makes room on a full disk
        raise
    return path


def _together(exchange: Callable[[str], list[str]], work: Callable[[], str | None]) -> list[str]:
    """What `work` returns in each process ("" for None). All processes wait for each other, even if one fails.

    Raises:
        OSError, SafetensorError: it failed in this process, or in another one.
    """
    failed = "failed: "
    try:
        done = work()
    except (OSError, SafetensorError) as error:
        exchange(f"{failed}{getattr(error, 'strerror', None) or error}")
        raise
    texts = exchange(done or "")
    for rank, text in enumerate(texts):
        if text.startswith(failed):
            raise OSError(f"process {rank}: {text.removeprefix(failed)}")
    return texts


def _make_folder(path: Path) -> None:
    """Make an empty folder for a checkpoint, in checkpoints_dir(run_dir)."""
    folder = path.parent
    if not folder.exists():
        folder.mkdir(parents=True)
        sync_directory(folder.parent)
        sync_directory(folder.parent.absolute().parent)
    _clear(path)
    path.mkdir()


def _names(file: str, count: int) -> list[str]:
    """The names of the files that stand for `file` where `count` processes write parts."""
    if count == 1 or file not in _IN_PARTS:
        return [file]
    stem, _, kind = file.partition(".")
    return [f"{stem}-{number:05}-of-{count:05}.{kind}" for number in range(1, count + 1)]


def _write_part(folder: Path, tensors: Tensors, rank: int, count: int) -> str:
    """Write this process's parts of model and optimizer; returns their sums, with a blank between them."""
    files = [folder / _names(file, count)[rank] for file in _IN_PARTS]
    for name, file in zip(("model", "optimizer"), files, strict=True):
        _write_tensors(file, tensors[name])
    return " ".join(map(sha256_file, files))


def _write_rest(folder: Path, tensors: Tensors, state: TrainState, tokenizer: Tokenizer, parts: list[str]) -> None:
    """Write the other files, and the manifest with the sums of the `parts`, last."""
    _write_tensors(folder / "random.safetensors", tensors["random"])
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    write_json(folder / "state.json", state.model_dump(mode="json"))
    sums = {name: sha256_file(folder / name) for name in _FILES if name not in _IN_PARTS}
    for file, of_parts in zip(_IN_PARTS, zip(*map(str.split, parts), strict=True), strict=True):
        sums |= dict(zip(_names(file, len(parts)), of_parts, strict=True))
    write_json(folder / "manifest.json", Digests(format_version=FORMAT_VERSION, sha256=sums).model_dump())


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file(dict(tensors), path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def retain(run_dir: Path, state: TrainState, since: int, keep_last: int, keep_every: int | None) -> None:
    """Update `latest` and `best`, and delete old checkpoints, damaged ones, and what crashed saves left behind.

    Keeps the best checkpoint, the newest `keep_last`, and those of every keep_every-th step.

    Args:
        state: of the newest whole checkpoint.
        since: the step of the whole checkpoint before it. Checkpoints between the two, and later ones, are damaged.
    """
    folder, paths = checkpoints_dir(run_dir), _all(run_dir)
    for leftover in folder.glob("*.tmp"):
        _clear(leftover)
    whole = [path for path in paths if _step_of(path) <= since or _step_of(path) == state.step]
    best = None if state.best_step is None else checkpoint_path(run_dir, state.best_step)
    if best not in whole and (folder / "best").is_file():  # that save failed: use the best checkpoint on disk
        best = folder / _first_line(folder / "best")
    _point(folder / "latest", whole[-1])
    if best in whole:
        _point(folder / "best", best)
    keep = {best, *whole[-keep_last:], *(path for path in whole if keep_every and _step_of(path) % keep_every == 0)}
    for path in paths:
        if path not in keep or path not in whole:
            _remove(path)


def _point(pointer: Path, path: Path) -> None:
    if not pointer.is_file() or _first_line(pointer) != path.name:
        write_atomic(pointer, path.name + "\n")


def _clear(path: Path) -> None:
    """Delete a folder, or any other file: on a pipe, shutil.rmtree would wait forever."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _aside(path: Path) -> Path:
    """The name that a checkpoint has while it is deleted. If files cannot be deleted, the next save tries again."""
    old = path.with_name(path.name + ".old.tmp")
    _clear(old)
    return old


def _remove(path: Path) -> None:
    """Delete a checkpoint. A crash leaves it whole, or under another name."""
    os.rename(path, old := _aside(path))
    _clear(old)


def _verify(path: Path, files: Collection[str], at: Callable[[str], None] = lambda place: None) -> None:
    """Compare some of a checkpoint's files with their sums.

    Raises:
        Damaged: a file is missing or differs, or the manifest has another format.
    """
    sums = _sums(path)
    for name, sha256 in itertools.chain.from_iterable(sums[file].items() for file in files):
        at(f"reading {path.name}/{name}")
        try:
            found = sha256_file(path / name)
        except (UserError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.EIO):
                raise  # it may pass, or a person can fix it; EIO means a damaged disk
            raise Damaged(f"{path / name} is missing or damaged: {error}") from None
        if found != sha256:
            raise Damaged(f"{path / name} is missing or damaged: its sha256 is not the manifest's")


def _sums(path: Path) -> dict[str, dict[str, str]]:
    """The sums in a checkpoint's manifest: for each of _FILES, those of its parts, by name and in order."""
    try:
        manifest = decode(Digests, read_json(path / "manifest.json", limit=_LARGEST_STATE))
    except UserError as error:
        raise Damaged(f"{path / 'manifest.json'} is damaged: {error}") from None
    if manifest.format_version != FORMAT_VERSION:
        message = f"{path} has format version {manifest.format_version}; this program reads {FORMAT_VERSION}"
        if manifest.format_version == _version_of_state(path):  # not damage, but another program's
            raise UserError(f"{message}: use another run_dir")
        raise Damaged(message)
    count = sum(name.startswith("model") for name in manifest.sha256)
    names = {file: _names(file, count) for file in _FILES}
    if not count or set(manifest.sha256) != set(itertools.chain.from_iterable(names.values())):
        raise Damaged(f"{path / 'manifest.json'} is damaged: it must list {', '.join(_FILES)}, or all of their parts")
    return {file: {name: manifest.sha256[name] for name in names[file]} for file in _FILES}


def _version_of_state(path: Path) -> Any:
    """The version in state.json, to tell another version from a damaged manifest."""
    try:
        state = read_json(path / "state.json", limit=_LARGEST_STATE)
    except UserError:
        return None
    return state.get("format_version") if isinstance(state, dict) else None
