"""A dataset directory from a stream of documents: made in out.partial, renamed to out when it is whole.

Every few seconds all that is written is brought to the disk, and then counted in out.partial/progress.json. A run that
was killed, at whatever moment, cuts the files to what is counted there and goes on after it: the bytes are those of a
run that was not. Once the manifest is there progress.json goes; then only clearing up and renaming are left to do.
"""

import contextlib
import errno
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common.console import say
from common.files import make_directory, sync_directory
from common.lock import owned
from common.settings import UserError
from data.prepare.assembly import Assembly, Batches, Plan
from data.prepare.dedup import DIGESTS
from data.prepare.journal import JOURNAL, Journal, changes_between, read_journal
from data.prepare.writer import WriterState
from data.shards import MANIFEST, TOKENIZER, Counts, Manifest, Split, SplitName, read_manifest
from data.tokenizer import save_tokenizer

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Outcome(NamedTuple):
    manifest: Manifest
    first: dict[str, str]
    """Where each reason to skip was met first, as far as it is known."""
    utf8_bytes: int
    """Of the documents that this run has written."""


def partial_dir(out_dir: Path) -> Path:
    """Where a dataset is written before it is whole."""
    out_dir = out_dir.resolve()
    return out_dir.with_name(out_dir.name + ".partial")


def existing(out_dir: Path, prepared: dict[str, Any]) -> Manifest | None:
    """The dataset in `out_dir` if it is there, made with these settings.

    Raises:
        UserError: the folder holds something else.
    """
    if (out_dir / MANIFEST).exists():
        manifest = read_manifest(out_dir)
        if changes := changes_between(manifest.prepared, prepared):
            raise UserError(f"out_dir={out_dir} was made with {changes}: choose another out_dir or delete it")
        say(f"{out_dir} is already prepared with these settings, its input not read again; delete it to do so")
        return manifest
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise UserError(f"out_dir={out_dir} exists and is not a dataset: choose another folder")
    return None


def build(plan: Plan, read: Callable[[Journal], Batches]) -> Manifest:
    """Make the dataset `plan.out_dir`, or go on making it.

    `read` is told what is written already, and gives what follows: batches, each with the position of its last item.

    Raises:
        UserError: nothing was left to train or validate on, the disk is full, or out.partial is of another dataset.
    """
    started = time.monotonic()
    make_directory(plan.out_dir.resolve().parent, "out_dir")
    directory = make_directory(partial_dir(plan.out_dir), "out_dir")
    taken = f"{directory} is being written by another process: wait until it is done"
    with owned(directory, lambda: taken), _full_disk_explained(directory):
        try:
            outcome = _finished(plan, directory) or _write(plan, directory, read)
        finally:
            if not (directory / MANIFEST).exists() and not (directory / JOURNAL).exists():
                shutil.rmtree(directory, ignore_errors=True)  # nothing in it to go on from
        _clear(directory, _dataset_files(outcome.manifest))
        os.replace(directory, plan.out_dir.resolve())
        sync_directory(plan.out_dir.resolve().parent)
    _summarize(plan.out_dir, outcome, time.monotonic() - started)
    return outcome.manifest


def _finished(plan: Plan, directory: Path) -> _Outcome | None:
    """What a run that was stopped between its manifest and the renaming has made."""
    if (directory / JOURNAL).exists() or not (directory / MANIFEST).exists():
        return None
    manifest = read_manifest(directory)
    if changes := changes_between(manifest.prepared, plan.made.prepared):
        raise UserError(f"{directory} was made with {changes}: delete it to start again")
    return _Outcome(manifest, {}, 0)


def _write(plan: Plan, directory: Path, read: Callable[[Journal], Batches]) -> _Outcome:
    journal = read_journal(directory, plan.made)
    if journal is None:
        _clear(directory, keep=set())
        save_tokenizer(plan.tokenizer, directory / TOKENIZER)
        journal = Journal(made=plan.made, skipped=dict(plan.skipped))
    else:
        (directory / MANIFEST).unlink(missing_ok=True)  # it is true again at the end
        place = f", up to {journal.place.input}:{journal.place.number}" if journal.place else ""
        say(f"going on with {directory}: {journal.documents:,} documents have been read{place}")
    with Assembly(plan, directory, journal) as assembly:
        with contextlib.closing(read(journal)) as batches:
            assembly.write(batches)
        manifest = assembly.finish()
    (directory / JOURNAL).unlink(missing_ok=True)
    sync_directory(directory)  # the database must not be gone before the journal is
    return _Outcome(manifest, assembly.first, _utf8_bytes(manifest.splits) - _utf8_bytes(journal.splits))


@contextlib.contextmanager
def _full_disk_explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        reason = os.strerror(error.errno)
    except sqlite3.OperationalError as error:
        reason = str(error)
    else:
        return
    raise UserError(
        f"{directory} cannot be written ({reason}): make space on its disk and give the same command again, "
        "it goes on from what is written"
    )


def _clear(directory: Path, keep: set[str]) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in keep:
            path.unlink()


def _dataset_files(manifest: Manifest) -> set[str]:
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    return {MANIFEST, TOKENIZER, DIGESTS, *(name for shard in shards for name in (shard.file, shard.index_file))}


def _utf8_bytes(splits: Mapping[SplitName, Split | WriterState]) -> int:
    return sum(counts.utf8_bytes for split in splits.values() for counts in split.sets.values())


def _summarize(out_dir: Path, outcome: _Outcome, seconds: float) -> None:
    manifest = outcome.manifest
    say(f"{'split':<6}{'set':<24}{'documents':>12}{'tokens':>16}{'bytes':>18}{'tokens/byte':>13}")
    for name, split in manifest.splits.items():
        for set_name, counts in split.sets.items():
            _say_counts(name, set_name, counts)
        _say_counts(name, "all", split.total)
    written = sum(split.total.documents for split in manifest.splits.values())
    skipped = sum(manifest.skipped.values())
    for reason, count in manifest.skipped.items():
        first = f" (first: {outcome.first[reason]})" if reason in outcome.first else ""
        say(f"skipped {count:,} x {reason}{first}")
    say(f"{written + skipped:,} documents in the input: {written:,} written, {skipped:,} skipped")
    megabytes = outcome.utf8_bytes / 1e6
    since = " since the restart" if outcome.utf8_bytes < _utf8_bytes(manifest.splits) else ""
    say(f"{out_dir} is ready: {megabytes:,.1f} MB in {seconds:.1f} s{since}, {megabytes / seconds:.1f} MB/s")


def _say_counts(split: str, set_name: str, counts: Counts) -> None:
    rate = counts.tokens / counts.utf8_bytes if counts.utf8_bytes else 0.0
    say(f"{split:<6}{set_name:<24}{counts.documents:>12,}{counts.tokens:>16,}{counts.utf8_bytes:>18,}{rate:>13.3f}")
