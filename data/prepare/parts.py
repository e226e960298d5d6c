"""Parts: the documents that have been tokenized so far. Preparing writes them, `join` makes a dataset of them.

A folder of parts, one for each task:

plan.json               what the dataset is made of
finished                an empty file: the whole input has been read
tokenizer.json          the tokenizer
part-00000.bin ...      token ids of the documents of a part, in the order of the input
part-00000.entries ...  an ENTRY for each of these documents
part-00000.json ...     everything else, and the sums of these two files; it is written last

A part is finished when its .json is there. A run that is stopped loses only the part that it was writing: the next run
goes on after the last finished part. Where parts begin and end has no influence on the dataset.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.files import make_directory, read_json, write_json
from common.lock import owned
from common.settings import UserError, decode, differences
from data.prepare.encode import Batch
from data.prepare.sources import Position, Unreadable
from data.prepare.writer import HashedFile
from data.shards import TOKENIZER, Count, Sha256, Strict, TokenizerId, check_size, check_sum
from data.tokenizer import Tokenizer, save_tokenizer

PLAN = "plan.json"
FINISHED = "finished"
ENTRY = np.dtype(
    [("tokens", "<u8"), ("input", "<u4"), ("number", "<u8"), ("set", "<u4"), ("utf8_bytes", "<u8"), ("digest", "S16")]
)
"""A document: its token ids, <|endoftext|> included; its input, a number into the part's `inputs`, and its number in
that input; its set, a number into the part's `set_names`; the size and the digest of its text."""

_SECONDS_OF_A_PART = 5.0
_TOKENS_OF_A_PART = 2**25
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Plan(Strict):
    """What a dataset is made of: only a run with the same plan may go on with its parts."""

    prepared: dict[str, Any]
    """The settings that decide what the dataset holds, and its input files with their sizes."""
    tokenizer: TokenizerId

    def changes(self, now: "Plan") -> str:
        """Describe the settings that differ, for a message; empty if none does."""
        ranks = "sha256 of the tokenizer's ranks"
        return changes_between(
            {**self.prepared, ranks: self.tokenizer.sha256}, {**now.prepared, ranks: now.tokenizer.sha256}
        )


class Part(Strict):
    """One finished part."""

    input: str
    """Where its last item stands in the input; the next part begins after it."""
    number: int
    tokens: Count
    documents: Count
    inputs: list[str]
    set_names: list[str]
    skipped: dict[str, Count]
    """Items that are no documents, by reason."""
    first: dict[str, str]
    """Where each reason was met first."""
    sha256: Sha256
    entries_sha256: Sha256


def changes_between(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe the settings that differ, for a message; empty if none does."""
    different = differences(before, now)
    return ", ".join(f"{key}={there!r} (now {here!r})" for key, (there, here) in different.items())


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
    taken = f"{folder} is being written by another process: wait until it is done"
    with owned(folder, lambda: taken):
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise UserError(
                f"{folder} cannot be written ({os.strerror(error.errno)}): free some space on its disk and give the "
                "same command again, it goes on from what is written"
            ) from None
        finally:
            if not (folder / FINISHED).exists() and not any(folder.glob("part-*.json")):
                shutil.rmtree(folder, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a folder of parts. The plan goes first: without it, whatever a kill leaves is not used."""
    (folder / PLAN).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def start(folder: Path, plan: Plan, tokenizer: Tokenizer) -> None:
    """Begin to write parts into `folder`, or check that those in it are of the same plan.

    Raises:
        UserError: they are not, or the plan is damaged.
    """
    if (folder / PLAN).exists():
        if changes := read_plan(folder).changes(plan):
            raise UserError(
                f"{folder} was begun with {changes}: go on with what it was started with, "
                f"or delete {folder} to start again"
            )
        return
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    save_tokenizer(tokenizer, folder / TOKENIZER)
    write_json(folder / PLAN, plan.model_dump(mode="json"))


def read_plan(folder: Path) -> Plan:
    """Read the plan of a folder of parts.

    Raises:
        UserError: it is damaged.
    """
    try:
        return decode(Plan, read_json(folder / PLAN))
    except UserError as error:
        raise damaged(folder, error) from None


class StoredPart(NamedTuple):
    """A finished part and where it is."""

    folder: Path
    number: int
    info: Part

    def path(self, suffix: str) -> Path:
        """Return the path of one of its files."""
        return _file(self.folder, self.number, suffix)

    def entries(self) -> np.ndarray:
        """Read its entries: ENTRY (documents,).

        Raises:
            UserError: they are damaged.
        """
        content = self.path("entries").read_bytes()
        try:
            check_sum(self.path("entries"), hashlib.sha256(content).hexdigest(), self.info.entries_sha256)
        except UserError as error:
            raise damaged(self.folder, error) from None
        return np.frombuffer(content, ENTRY)


def _file(folder: Path, number: int, suffix: str) -> Path:
    return folder / f"part-{number:05}.{suffix}"


def read_parts(folder: Path, dtype: np.dtype) -> list[StoredPart]:
    """Read the finished parts of a folder in order, and check the sizes of their files.

    Raises:
        UserError: a file is missing, damaged or of another size.
    """
    parts = []
    try:
        for number in range(len(list(folder.glob("part-*.json")))):
            part = StoredPart(folder, number, decode(Part, read_json(_file(folder, number, "json"))))
            check_size(part.path("bin"), part.info.tokens * dtype.itemsize)
            check_size(part.path("entries"), part.info.documents * ENTRY.itemsize)
            parts.append(part)
    except UserError as error:
        raise damaged(folder, error) from None
    return parts


def write_part(folder: Path, number: int, batches: Iterator[Batch]) -> bool:
    """Write the next part, the batches of the next few seconds, to the disk. False if there are no more batches."""
    tokens = documents = 0
    position: Position | None = None
    inputs: dict[str, int] = {}
    set_names: dict[str, int] = {}
    skipped: Counter[str] = Counter()
    first: dict[str, str] = {}
    due = time.monotonic() + _SECONDS_OF_A_PART
    with HashedFile(_file(folder, number, "bin")) as ids, HashedFile(_file(folder, number, "entries")) as entries:
        for batch in batches:
            rows = []
            for item in batch.items:
                if isinstance(item, Unreadable):
                    skipped[item.reason] += 1
                    first.setdefault(item.reason, item.where)
                else:
                    input_ = inputs.setdefault(item.input, len(inputs))
                    set_ = set_names.setdefault(item.set_name, len(set_names))
                    rows.append((item.tokens, input_, item.number, set_, item.utf8_bytes, item.digest))
            ids.write(batch.ids.data)
            entries.write(np.array(rows, ENTRY).tobytes())
            tokens += batch.ids.size
            documents += len(rows)
            position = batch.position
            if tokens >= _TOKENS_OF_A_PART or time.monotonic() >= due:
                break
        if position is None:
            return False
        part = Part(
            input=position.input,
            number=position.number,
            tokens=tokens,
            documents=documents,
            inputs=list(inputs),
            set_names=list(set_names),
            skipped=skipped,
            first=first,
            sha256=ids.finish(),
            entries_sha256=entries.finish(),
        )
    write_json(_file(folder, number, "json"), part.model_dump(mode="json"))
    return True
