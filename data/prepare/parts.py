"""Parts: the documents that have been tokenized so far. Preparing writes them, `join` makes a dataset of them.

A folder of parts, one for each task:

plan.json           what the dataset is made of
tokenizer.json      the tokenizer
part-00000.npz ...  `ids`, the token ids of the documents of a part, in the order of the input; `entries`, an ENTRY for
                    each of these documents; `info`, a `Part` as JSON. The file carries checksums
finished            an empty file: the whole input has been read

A part has its name only when all of it is on the disk. A run that is stopped loses only the part that it was writing:
the next run goes on after the last part. Where parts begin and end has no influence on the dataset.
"""

import contextlib
import errno
import io
import json
import os
import shutil
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile

from common.files import make_directory, open_file, read_json, write_atomic, write_json
from common.lock import owned
from common.settings import UserError, decode, differences
from data.prepare.encode import Batch, Skipped
from data.prepare.items import Position
from data.shards import TOKENIZER, Count, Strict, TokenizerId
from data.tokenizer import Tokenizer, save_tokenizer

PLAN = "plan.json"
RANKS = "sha256 of the tokenizer's ranks"
FINISHED = "finished"
ENTRY = np.dtype(
    [("tokens", "<u8"), ("input", "<u4"), ("number", "<u8"), ("set", "<u4"), ("utf8_bytes", "<u8"), ("digest", "S16")]
)
"""A document: its token ids, <|endoftext|> included; its input, a number into the part's `inputs`, and its number in
that input; its set, a number into the part's `set_names`; the size and the digest of its text."""

_SECONDS_OF_A_PART = 5.0
_TOKENS_OF_A_PART = 2**24
_MOST_CHANGES = 4  # in a message
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Plan(Strict):
    """What a dataset is made of: only a run with the same plan may go on with its parts."""

    prepared: dict[str, Any]
    """The settings that decide what the dataset holds, and its input files with their sizes."""
    tokenizer: TokenizerId
    piece: int | None = None
    """About how many characters long documents are cut into; None: not cut."""

    def changes(self, now: "Plan") -> str:
        """Describe the settings that differ, for a message; empty if none does."""
        before, after = ({**plan.prepared, RANKS: plan.tokenizer.sha256} for plan in (self, now))
        return changes_between(before, after)


class Part(Strict):
    """What a part records besides its documents themselves."""

    input: str
    """Where its last item stands in the input; the next part begins after it."""
    number: int
    documents: Count
    inputs: list[str]
    set_names: list[str]
    skipped: dict[str, Count]
    """Items that are no documents, by reason."""
    first: dict[str, str]
    """Where each reason was met first."""
    _path: Path

    @property
    def position(self) -> Position:
        """Where its last item stands in the input."""
        return Position(self.input, self.number)

    def entries(self) -> np.ndarray:
        """Read its entries: ENTRY (documents,). Raises UserError if they are damaged."""
        return _read(self._path, "entries")

    def ids(self) -> np.ndarray:
        """Read its token ids. Raises UserError if they are damaged."""
        return _read(self._path, "ids")


def changes_between(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe the settings that differ, or the first of many, for a message; empty if none does."""
    different = sorted(differences(before, now).items(), key=lambda item: item[0].startswith("input."))
    listed = [f"{key}={there!r} (now {here!r})" for key, (there, here) in different[:_MOST_CHANGES]]
    others = len(different) - len(listed)
    return ", ".join([*listed, f"and {others} more"] if others else listed)


def damaged(folder: Path, error: object) -> UserError:
    """Build the error for a folder of parts that cannot be used any more."""
    return UserError(f"{folder} is damaged: delete it and run the command that made it again ({error})")


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Hold the lock on `folder`, which is created if need be and removed again if nothing useful is left in it.

    Raises:
        UserError: another process holds the lock, or the disk is full.
    """
    make_directory(folder, "out_dir")
    with owned(folder, lambda: f"{folder} is being written by another process: wait until it is done"):
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            remedy = "free some space on its disk and give the same command again, it goes on from what is written"
            raise UserError(f"{folder} cannot be written ({os.strerror(error.errno)}): {remedy}") from None
        finally:
            if not (folder / FINISHED).exists() and not any(folder.glob("part-*.npz")):
                shutil.rmtree(folder, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a folder of parts. The plan goes first: without it, whatever a kill leaves is not used."""
    (folder / PLAN).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def start(folder: Path, plan: Plan, tokenizer: Tokenizer) -> Plan:
    """Begin to write parts into `folder`, or check that those in it are of the same plan; return the plan in use.

    Raises:
        UserError: they are not, or the plan is damaged.
    """
    if (folder / PLAN).exists():
        if changes := (begun := read_plan(folder)).changes(plan):
            raise UserError(f"{folder} was begun with {changes}: go on with the same, or delete it to start again")
        return begun
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    save_tokenizer(tokenizer, folder / TOKENIZER)
    write_json(folder / PLAN, plan.model_dump(mode="json"))
    return plan


def read_plan(folder: Path) -> Plan:
    """Read the plan of a folder of parts.

    Raises:
        UserError: it is damaged.
    """
    try:
        return decode(Plan, read_json(folder / PLAN))
    except UserError as error:
        raise damaged(folder, error) from None


def _path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05}.npz"


def _read(path: Path, name: str) -> np.ndarray:
    try:
        with open_file(path) as file, NpzFile(file) as arrays:
            return arrays[name]
    except (OSError, ValueError, LookupError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise damaged(path.parent, f"{path.name}: {error}") from None


def read_parts(folder: Path) -> list[Part]:
    """Read the parts of a folder in order, without their documents.

    Raises:
        UserError: a file is missing or damaged.
    """
    parts = []
    for number in range(len(list(folder.glob("part-*.npz")))):
        part = decode(Part, json.loads(_read(_path(folder, number), "info").tobytes()))
        part._path = _path(folder, number)
        parts.append(part)
    return parts


def write_part(folder: Path, number: int, batches: Iterator[Batch]) -> bool:
    """Write the next part, the batches of the next few seconds, to the disk. False if there are no more batches."""
    ids: list[np.ndarray] = []
    entries: list[np.ndarray] = []
    inputs: dict[str, int] = {}
    set_names: dict[str, int] = {}
    skipped: Counter[str] = Counter()
    first: dict[str, str] = {}
    due = time.monotonic() + _SECONDS_OF_A_PART
    for batch in batches:
        rows = []
        for item in batch.items:
            if isinstance(item, Skipped):
                skipped[item.reason] += 1
                first.setdefault(item.reason, item.where)
            else:
                input_ = inputs.setdefault(item.position.input, len(inputs))
                set_ = set_names.setdefault(item.set_name, len(set_names))
                rows.append((item.tokens, input_, item.position.number, set_, item.utf8_bytes, item.digest))
        ids.append(batch.ids)
        entries.append(np.array(rows, ENTRY))
        if sum(part.size for part in ids) >= _TOKENS_OF_A_PART or time.monotonic() >= due:
            break
    if not ids:
        return False
    part = Part(
        **batch.items[-1].position._asdict(),
        documents=sum(part.size for part in entries),
        inputs=list(inputs),
        set_names=list(set_names),
        skipped=skipped,
        first=first,
    )
    content = io.BytesIO()
    info = np.frombuffer(part.model_dump_json().encode(), np.uint8)
    np.savez(content, ids=np.concatenate(ids), entries=np.concatenate(entries), info=info)
    write_atomic(_path(folder, number), content.getvalue())
    return True
