"""The journal beside a dataset that is being written: from it, a run that was killed goes on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from common.files import read_json, write_json
from common.settings import UserError, decode, differences
from data.prepare.writer import WriterState
from data.shards import Count, SplitName, Strict, TokenizerId

JOURNAL = "progress.json"


class Place(Strict):
    """A document's place in the input."""

    input: str
    number: int


class Made(Strict):
    """What a dataset is made of: only a run that is made of the same may go on with it."""

    prepared: dict[str, Any]
    """The settings that decide what it holds."""
    inputs: Mapping[str, int | str | None]
    """Every file of the input, with its size; for a merge every part, with its fingerprint."""
    tokenizer: TokenizerId


class Journal(Strict):
    """Everything up to `place` is written and on the disk."""

    made: Made
    place: Place | None = None
    documents: Count = 0
    """Those that could be read so far, duplicates included."""
    splits: dict[SplitName, WriterState] = Field(default_factory=dict)
    inputs: list[str] = Field(default_factory=list)
    set_names: list[str] = Field(default_factory=list)
    skipped: dict[str, Count] = Field(default_factory=dict)
    first: dict[str, str] = Field(default_factory=dict)
    """Where each reason was met first."""


def write_journal(directory: Path, journal: Journal) -> None:
    """Replace the journal in one step. What it counts must be on the disk already."""
    write_json(directory / JOURNAL, journal.model_dump(mode="json"))


def read_journal(directory: Path, made: Made) -> Journal | None:
    """The journal of a run that was stopped, or None if there is none.

    Raises:
        UserError: it is damaged, or of a run with other settings, input or tokenizer.
    """
    path = directory / JOURNAL
    if not path.exists():
        return None
    try:
        journal = decode(Journal, read_json(path))
    except UserError as error:
        raise damaged(directory, error) from None
    _check_same(directory, journal.made, made)
    return journal


def damaged(directory: Path, error: Exception) -> UserError:
    """The error that nobody can go on with what is in a directory."""
    return UserError(f"{directory} is damaged: delete it to start again ({error})")


def changes_between(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The settings that differ, for a message; empty if none does."""
    different = differences(before, now)
    return ", ".join(f"{key}={there!r} (now {here!r})" for key, (there, here) in different.items())


def _check_same(directory: Path, before: Made, now: Made) -> None:
    remedy = f"go on with what it was started with, or delete {directory} to start again"
    if changed := [name for name in {**before.inputs, **now.inputs} if before.inputs.get(name) != now.inputs.get(name)]:
        name, more = changed[0], f" ({len(changed) - 1} more changed)" if len(changed) > 1 else ""
        sizes = f"{_size(before, name)} (now {_size(now, name)})"
        raise UserError(f"{directory} was begun with the input {name} of {sizes}{more}: {remedy}")
    if changes := changes_between(before.prepared, now.prepared):
        raise UserError(f"{directory} was begun with {changes}: {remedy}")
    if before.tokenizer != now.tokenizer:
        raise UserError(f"{directory} was begun with another tokenizer {now.tokenizer.name!r}: {remedy}")


def _size(made: Made, name: str) -> str:
    size = made.inputs.get(name, "nothing")
    return f"{size:,} bytes" if isinstance(size, int) else str(size)[:12]
