"""The parts that several tasks have prepared, joined into the very bytes that one machine would have made."""

import functools
import heapq
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from common.console import Track
from common.settings import UserError
from data.documents import Document, read_documents
from data.prepare.assembly import Batches, Plan
from data.prepare.build import build, existing, partial_dir
from data.prepare.dataset import part_dir
from data.prepare.dedup import DIGESTS, read_digests
from data.prepare.encode import Batch, Encoded
from data.prepare.journal import JOURNAL, Journal, Made, changes_between
from data.prepare.sources import Position
from data.shards import TOKENIZER, Manifest, SplitName, read_manifest
from data.tokenizer import load_tokenizer

_TOKENS_OF_A_BATCH = 2**20
_TASK_KEYS = ("num_tasks", "task_index")  # what a part's settings have and the whole's have not
_PART_NAME = re.compile(r"task-(\d{5})-of-(\d{5})")


class Part(NamedTuple):
    """What one task has made."""

    directory: Path
    manifest: Manifest

    @property
    def documents(self) -> int:
        """In both splits."""
        return sum(split.total.documents for split in self.manifest.splits.values())


def merge(parts_dir: Path, out_dir: Path) -> Manifest:
    """Join the parts in `parts_dir` into the dataset `out_dir`; stopped, it goes on when started again.

    Raises:
        UserError: a part is missing, damaged, or made with other settings than the first.
    """
    parts = find_parts(parts_dir)
    prepared = _prepared(parts)
    if (manifest := existing(out_dir, prepared)) is not None:
        return manifest
    first = parts[0]
    made = Made(
        prepared=prepared,
        inputs={part.directory.name: part.manifest.fingerprint for part in parts},
        tokenizer=first.manifest.tokenizer,
    )
    tokenizer = load_tokenizer(first.directory / TOKENIZER)
    if tokenizer.sha256 != made.tokenizer.sha256:
        raise UserError(f"{first.directory / TOKENIZER} is not the tokenizer of its manifest: prepare this part again")
    plan = Plan(
        out_dir=out_dir,
        made=made,
        tokenizer=tokenizer,
        shard_tokens=prepared["shard_tokens"],
        dedup=prepared["dedup"] == "exact",
        skipped=sum((Counter(part.manifest.skipped) for part in parts), Counter()),
    )
    return build(plan, functools.partial(_read, plan, parts))


def find_parts(parts_dir: Path) -> list[Part]:
    """All parts, in the order of their tasks.

    Raises:
        UserError: there are none, or not all.
    """
    found = [match for path in parts_dir.glob("task-*") if (match := _PART_NAME.fullmatch(path.name))]
    totals = sorted({int(match[2]) for match in found})
    if not totals:
        raise UserError(
            f"{parts_dir} holds no parts task-00000-of-...: give the out_dir of scripts/prepare_data.py with num_tasks"
        )
    if len(totals) > 1:
        raise UserError(f"{parts_dir} holds parts of num_tasks={totals[0]} and num_tasks={totals[1]}: delete one kind")
    directories = [part_dir(parts_dir, i, totals[0]) for i in range(totals[0])]
    missing = [i for i, directory in enumerate(directories) if not directory.is_dir()]
    if missing:
        more = f" ({len(missing)} of {totals[0]} are)" if len(missing) > 1 else ""
        raise UserError(
            f"{directories[missing[0]]} is missing{more}: run the command that made the others, "
            f"with task_index={missing[0]}, to its end"
        )
    return [Part(directory, read_manifest(directory)) for directory in directories]


def _prepared(parts: list[Part]) -> dict[str, Any]:
    """The settings of the whole."""
    for part in parts[1:]:
        if changes := changes_between(_of_the_whole(parts[0]), _of_the_whole(part)):
            raise UserError(
                f"{part.directory} was made with other settings than {parts[0].directory.name}: {changes}: "
                "prepare one of them again"
            )
        if part.manifest.tokenizer != parts[0].manifest.tokenizer:
            raise UserError(f"{part.directory} was made with another tokenizer than {parts[0].directory.name}")
    return _of_the_whole(parts[0])


def _of_the_whole(part: Part) -> dict[str, Any]:
    return {key: value for key, value in part.manifest.prepared.items() if key not in _TASK_KEYS}


def _read(plan: Plan, parts: list[Part], journal: Journal) -> Batches:
    """What follows the documents that the journal counts."""
    done = journal.documents
    total = sum(part.documents for part in parts)
    try:
        with Track("merging, documents", total, done) as track:
            for part in parts:
                skipped = min(done, part.documents)
                done -= skipped
                if skipped < part.documents:
                    documents = itertools.islice(_encoded(part, plan), skipped, None)
                    for batch in _batches(documents):
                        last = batch[-1]
                        yield Batch([*batch], Position(last.input, last.number))
                        track.advance(len(batch))
    except UserError:  # a damaged shard is known at its end: some of it may have been written, and nobody may go on
        (partial_dir(plan.out_dir) / JOURNAL).unlink(missing_ok=True)
        raise


def _batches(documents: Iterator[Encoded]) -> Iterator[list[Encoded]]:
    batch: list[Encoded] = []
    tokens = 0
    for document in documents:
        if tokens >= _TOKENS_OF_A_BATCH:
            yield batch
            batch, tokens = [], 0
        batch.append(document)
        tokens += document.ids.size
    if batch:  # the last one goes out when the sums of all files have been checked
        yield batch


def _encoded(part: Part, plan: Plan) -> Iterator[Encoded]:
    """A part's documents in the order of its input."""
    lengths = plan.tokenizer.byte_lengths
    digests = read_digests(part.directory / DIGESTS, part.documents) if plan.dedup else None
    for i, (split, document) in enumerate(_in_order(part)):
        digest = b"" if digests is None else digests[i].tobytes()
        utf8_bytes = int(lengths[document.ids].sum())
        yield Encoded(split, document.set_name, utf8_bytes, document.ids, digest, document.input, document.number)


def _in_order(part: Part) -> Iterator[tuple[SplitName, Document]]:
    """The documents of both splits as they were in the input: inputs are numbered in the order they were read."""
    order = {name: i for i, name in enumerate(part.manifest.inputs)}

    def of(split: SplitName) -> Iterator[tuple[SplitName, Document]]:
        return ((split, document) for document in read_documents(part.directory, part.manifest, split))

    return heapq.merge(*map(of, get_args(SplitName)), key=lambda found: (order[found[1].input], found[1].number))
