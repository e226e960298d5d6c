"""Documents to a dataset directory: tokenised by worker processes and written in input order."""

import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from common.console import Track
from common.settings import Settings, UserError
from data.prepare.assembly import Batches, Plan
from data.prepare.build import build, existing, partial_dir
from data.prepare.encode import Batch, Encoded, OnError, encode_all
from data.prepare.journal import Journal, Made
from data.prepare.sources import Document, FileSource, Position, Raw, Seen, Source, SourceConfig, Unreadable
from data.shards import MANIFEST, TOKENIZER, Manifest, TokenizerId
from data.tokenizer import TokenizerConfig, build_tokenizer


class PrepareConfig(Settings):
    """What scripts/prepare_data.py makes a dataset from."""

    data: SourceConfig
    """Where documents come from."""
    tokenizer: TokenizerConfig
    """What turns them into token ids."""
    out_dir: Path
    """The dataset directory to make; with num_tasks, the folder of all parts."""
    val_fraction: float | None = Field(default=None, gt=0, lt=1)
    """The share of documents for the validation split. null: 0.05 for stdlib and text, 0.005 for jsonl and pile."""
    shard_tokens: PositiveInt = 100_000_000
    """A shard is full with the document that reaches this number of tokens."""
    dedup: Literal["none", "exact"] = "none"
    """exact: of documents with the same text only the first is kept."""
    on_error: OnError = "skip"
    """What to do with what can't be read. skip: count it, by reason. stop: end with its place."""
    workers: PositiveInt | None = None
    """Processes that tokenise; the dataset is the same for any number. null: one for every CPU."""
    num_tasks: PositiveInt = 1
    """On how many machines the work is spread; scripts/merge_dataset.py joins what they made."""
    task_index: NonNegativeInt = 0
    """Which of these this is, from 0: it takes its share of the input files."""

    @property
    def fraction(self) -> float:
        """val_fraction, or what is usual for the source."""
        return self.data.usual_val_fraction if self.val_fraction is None else self.val_fraction

    def recorded(self) -> dict[str, Any]:
        """The settings that decide what the dataset holds, and its whole input: its manifest keeps them, as JSON."""
        kept = self.model_dump(mode="json", include={"data", "tokenizer", "shard_tokens", "dedup"})
        task = {"num_tasks": self.num_tasks, "task_index": self.task_index} if self.num_tasks > 1 else {}
        return {**kept, "val_fraction": self.fraction, "input": self.data.inputs(), **task}


def prepare(config: PrepareConfig) -> Manifest:
    """Make the dataset `config.out_dir` or go on making it; return at once if it is there, made with the same settings.

    Raises:
        UserError: the folder holds something else, or the dataset cannot be made.
    """
    source, out_dir = _share(config)
    if (manifest := existing(out_dir, config.recorded())) is not None:
        return manifest
    tokenizer = build_tokenizer(config.tokenizer)
    made = Made(
        prepared=config.recorded(),
        inputs=source.inputs(),
        tokenizer=TokenizerId(name=tokenizer.name, n_vocab=tokenizer.n_vocab, sha256=tokenizer.sha256),
    )
    plan = Plan(
        out_dir=out_dir,
        made=made,
        tokenizer=tokenizer,
        shard_tokens=config.shard_tokens,
        dedup=config.dedup == "exact",
        is_part=config.num_tasks > 1,
    )
    return build(plan, functools.partial(_read, config, source, out_dir))


def part_dir(out_dir: Path, task_index: int, num_tasks: int) -> Path:
    """Where a task puts its part."""
    return out_dir / f"task-{task_index:05}-of-{num_tasks:05}"


class Share(FileSource):
    """One task's share of a source: a row of files, so that the shares of all tasks follow on each other."""

    whole: FileSource
    num_tasks: int
    task_index: int

    def paths(self) -> dict[str, Path]:
        """The task's files."""
        files = list(self.whole.paths().items())
        first, stop = (i * len(files) // self.num_tasks for i in (self.task_index, self.task_index + 1))
        return dict(files[first:stop])

    def read(self, name: str, path: Path, seen: Seen) -> Iterator[Raw]:
        """As the whole source does."""
        return self.whole.read(name, path, seen)

    def parse(self, raw: Raw) -> Document | Unreadable:
        """As the whole source does."""
        return self.whole.parse(raw)


def _share(config: PrepareConfig) -> tuple[Source, Path]:
    """What this task reads and where it puts it: with one task, everything, and out_dir."""
    num_tasks, task_index = config.num_tasks, config.task_index
    if task_index >= num_tasks:
        raise UserError(
            f"task_index={task_index} is out of range with num_tasks={num_tasks}: give one from 0 to {num_tasks - 1}"
        )
    if num_tasks == 1:
        return config.data, config.out_dir
    if not isinstance(config.data, FileSource):
        raise UserError(f"num_tasks={num_tasks} shares out files, data={config.data.name} has none: use data=jsonl")
    files = len(config.data.paths())
    if files < num_tasks:
        raise UserError(f"num_tasks={num_tasks} is more than the input's files, {files}: use at most num_tasks={files}")
    if (config.out_dir / MANIFEST).exists():
        raise UserError(f"out_dir={config.out_dir} is a dataset: choose another folder for the parts of num_tasks")
    share = Share(whole=config.data, num_tasks=num_tasks, task_index=task_index)
    return share, part_dir(config.out_dir, task_index, num_tasks)


def _read(config: PrepareConfig, source: Source, out_dir: Path, journal: Journal) -> Batches:
    """The documents that follow on what the journal counts, their progress shown."""
    progress = Progress()
    encoded = encode_all(
        source,
        partial_dir(out_dir) / TOKENIZER,
        config.fraction,
        config.workers or os.cpu_count() or 1,
        on_error=config.on_error,
        seen=progress.add,
        after=Position(journal.place.input, journal.place.number) if journal.place else None,
    )
    yield from progress.show(encoded, source.size())


class Progress:
    """How far the input has been read, and how fast its text is written."""

    def __init__(self) -> None:
        self.read = self.documents = self.utf8_bytes = 0

    def add(self, n_bytes: int) -> None:
        """So many more bytes of the input have been read."""
        self.read += n_bytes

    def show(self, encoded: Iterator[Batch], size: int | None) -> Batches:
        """Pass batches on, and show each on its way. Time counts from the first: a restart first reads up to there."""
        if (first := next(encoded, None)) is None:
            return
        with Track("reading, bytes", size, self.read) as track:
            started = time.monotonic()
            yield first
            for batch in encoded:
                yield batch
                documents = [item for item in batch.items if isinstance(item, Encoded)]
                self.documents += len(documents)
                self.utf8_bytes += sum(document.utf8_bytes for document in documents)
                megabytes, seconds = self.utf8_bytes / 1e6, time.monotonic() - started
                note = f"{self.documents:,} documents, {megabytes:,.0f} MB of text, {megabytes / seconds:.1f} MB/s"
                track.advance(self.read - track.done, note)
