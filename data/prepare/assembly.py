"""A dataset while it is written: documents are added in input order, and every few seconds all of it is saved."""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import NamedTuple, get_args

from common.settings import UserError
from data.documents import read_documents
from data.prepare.dedup import DIGESTS, SeenDigests
from data.prepare.encode import Batch, Encoded, document_digest, document_place
from data.prepare.journal import JOURNAL, Journal, Made, Place, damaged, write_journal
from data.prepare.sources import Unreadable
from data.prepare.writer import Names, ShardWriter
from data.shards import MAX_SETS, Manifest, Split, SplitName, write_manifest
from data.tokenizer import Tokenizer

_SECONDS_BETWEEN_SAVES = 5.0
_SHARE_OF_SAVING = 0.02  # of the time, at most, however slow the disk is
_MAX_INPUTS = 2**32
_WANTED_IN_A_SPLIT = 10  # documents, by the val_fraction that is suggested where one would be empty
_ENOUGH_PLACES = 1000  # to choose it by

Batches = Generator[Batch, None, None]


class Plan(NamedTuple):
    """What is made."""

    out_dir: Path
    made: Made
    tokenizer: Tokenizer
    shard_tokens: int
    dedup: bool
    is_part: bool = False
    """One task's part: it may be empty, and with dedup it keeps its digests for the merge."""
    skipped: Mapping[str, int] = {}
    """What was skipped before this stream began, by reason."""


class Assembly:
    """A dataset that grows, a context manager: documents are added in input order, and now and then all is saved."""

    def __init__(self, plan: Plan, directory: Path, journal: Journal) -> None:
        """Go on after `journal`.

        Raises:
            UserError: the files in `directory` are not what it says.
        """
        self.plan, self.directory = plan, directory
        self.place, self.documents = journal.place, journal.documents
        self.skipped, self.first = Counter(journal.skipped), dict(journal.first)
        self.inputs = Names("inputs", _MAX_INPUTS, journal.inputs)
        self.set_names = Names("sets", MAX_SETS, journal.set_names)
        with contextlib.ExitStack() as stack:
            try:
                self.writers = {name: stack.enter_context(self._writer(name, journal)) for name in get_args(SplitName)}
                self.seen = stack.enter_context(SeenDigests(directory, journal.documents)) if plan.dedup else None
            except UserError as error:
                raise damaged(directory, error) from None
            self._files = stack.pop_all()

    def __enter__(self) -> "Assembly":
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    def write(self, batches: Batches) -> None:
        """Add every batch, and save every few seconds."""
        due = time.monotonic() + _SECONDS_BETWEEN_SAVES
        for batch in batches:
            for item in batch.items:
                self.add(item)
            self.place = Place(input=batch.position.input, number=batch.position.number)
            if time.monotonic() >= due:
                began = time.monotonic()
                self.save()
                now = time.monotonic()
                due = now + max(_SECONDS_BETWEEN_SAVES, (now - began) / _SHARE_OF_SAVING)

    def add(self, item: Encoded | Unreadable) -> None:
        """Write one document, or count why not."""
        if isinstance(item, Unreadable):
            self._skip(item.reason, item.where)
            return
        self.documents += 1
        if self.seen is not None and self.seen.is_duplicate(item.digest, self.documents):
            self._skip("duplicate document", f"{item.input}:{item.number}")
        else:
            writer = self.writers[item.split]
            writer.append(item.ids, item.set_name, item.utf8_bytes, item.input, item.number)

    def save(self) -> None:
        """Bring everything to the disk, and then count it in the journal."""
        for writer in self.writers.values():
            writer.flush()
        if self.seen is not None:
            self.seen.commit()
        write_journal(self.directory, self._journal())

    def finish(self) -> Manifest:
        """Close the shards and write the manifest.

        Raises:
            UserError: nothing was left to train or validate on; there is no use in keeping the directory then.
        """
        splits: dict[SplitName, Split] = {name: writer.finish() for name, writer in self.writers.items()}
        manifest = Manifest(
            tokenizer=self.plan.made.tokenizer,
            inputs=self.inputs.names,
            set_names=self.set_names.names,
            splits=splits,
            skipped=dict(sorted(self.skipped.items())),
            prepared=self.plan.made.prepared,
        )
        if not self.plan.is_part:
            self._check_not_empty(manifest)
        elif self.seen is not None:
            self.seen.save(self.directory / DIGESTS)
        write_manifest(self.directory, manifest)
        return manifest

    def _writer(self, split: SplitName, journal: Journal) -> ShardWriter:
        n_vocab, state = self.plan.tokenizer.n_vocab, journal.splits.get(split)
        return ShardWriter(self.directory, split, n_vocab, self.plan.shard_tokens, self.set_names, self.inputs, state)

    def _skip(self, reason: str, where: str) -> None:
        self.skipped[reason] += 1
        self.first.setdefault(reason, where)

    def _journal(self) -> Journal:
        return Journal(
            made=self.plan.made,
            place=self.place,
            documents=self.documents,
            splits={split: writer.state() for split, writer in self.writers.items()},
            inputs=self.inputs.names,
            set_names=self.set_names.names,
            skipped=dict(self.skipped),
            first=self.first,
        )

    def _check_not_empty(self, manifest: Manifest) -> None:
        documents = {name: split.total.documents for name, split in manifest.splits.items()}
        total, val_fraction = sum(documents.values()), self.plan.made.prepared["val_fraction"]
        for name, count in documents.items():
            if count == 0:
                (self.directory / JOURNAL).unlink(missing_ok=True)  # no use in going on from here
                if total == 0:
                    why = ", ".join(f"{n} x {reason}" for reason, n in self.skipped.items()) or "it has no documents"
                    raise UserError(f"the corpus is empty ({why}): check data.path")
                raise UserError(
                    f"none of {total} documents went to '{name}' with val_fraction={val_fraction}: "
                    + self._remedy(manifest, name)
                )

    def _remedy(self, manifest: Manifest, empty: SplitName) -> str:
        """What to do about an empty split: the val_fraction that gives it some documents, if there is one."""
        (full,) = manifest.splits.keys() - {empty}
        places: set[float] = set()
        for document in read_documents(self.directory, manifest, full):
            utf8 = self.plan.tokenizer.decode_bytes(document.ids[:-1].tolist())
            places.add(document_place(document_digest(utf8)))
            if len(places) == _ENOUGH_PLACES:
                break
        if len(places) < 2:
            return "the text decides, and there is only one: add documents with other texts"
        in_order, some = sorted(places), min(_WANTED_IN_A_SPLIT, len(places) // 2)
        n_val = some if empty == "val" else len(places) - some
        return f"try val_fraction={_shortest_between(*in_order[n_val - 1 : n_val + 1])} or add documents"


def _shortest_between(low: float, high: float) -> float:
    """A number of few decimal places that is above `low` and at most `high`."""
    shortened = (math.floor(high * 10**digits) / 10**digits for digits in range(1, 17))
    return next((x for x in shortened if low < x <= high), high)
