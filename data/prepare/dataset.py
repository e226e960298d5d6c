"""Documents to a dataset directory: tokenized by worker processes, written as parts, and joined."""

import contextlib
import itertools
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from common.console import Track, say
from common.files import write_atomic
from common.settings import Settings, UserError
from data.prepare.encode import Batch, Encoded, OnError, Skipped, encode_all
from data.prepare.items import NO_TEXT, Position
from data.prepare.join import EmptySplit, Unusable, check_text, existing, join, partial_dir
from data.prepare.parts import FINISHED, Plan, read_parts, remove, start, write_part, writing
from data.prepare.sources import FileSource, HubSource, JsonlSource, Source, StdlibSource, TextSource
from data.prepare.tasks import Task
from data.shards import MANIFEST, TOKENIZER, Manifest, TokenizerId
from data.tokenizer import TokenizerConfig, build_tokenizer

SourceConfig = Annotated[StdlibSource | TextSource | JsonlSource | HubSource | Task, Field(discriminator="name")]

_CHECKED_ITEMS = 10_000  # after so many, a text_field that most documents lack is an error


class PrepareConfig(Settings, defaults="prepare"):
    """Settings of scripts/prepare_data.py."""

    data: SourceConfig
    """Where documents come from."""
    tokenizer: TokenizerConfig
    """How their text becomes token ids."""
    out_dir: Path
    """The dataset directory to make; with num_tasks, the folder of all parts."""
    val_fraction: float | None = Field(gt=0, lt=1)
    """The share of documents for the validation split. null: 0.005 for jsonl and datasets of the hub, else 0.05."""
    val_tokens: PositiveInt | None
    """In place of val_fraction: the documents with the first so many tokens of the input are for validation."""
    shard_tokens: PositiveInt
    """A shard is full with the document that reaches this number of tokens."""
    dedup: Literal["none", "exact"]
    """exact: keep only the first of documents with the same text."""
    on_error: OnError
    """What to do with documents that cannot be read. skip: count them by reason. stop: end with an error."""
    workers: PositiveInt | None
    """Processes that tokenize; the dataset does not depend on their number. null: one for every CPU."""
    num_tasks: PositiveInt
    """The number of machines that share the work; scripts/merge_dataset.py joins what they wrote."""
    task_index: NonNegativeInt
    """The number of this machine, from 0: it reads its share of the input files."""

    @model_validator(mode="after")
    def _check_task(self) -> "PrepareConfig":
        if self.task_index >= self.num_tasks:
            raise ValueError(f"task_index={self.task_index} is out of range: give one from 0 to {self.num_tasks - 1}")
        if self.val_tokens and self.val_fraction:
            raise ValueError(f"val_tokens={self.val_tokens} replaces val_fraction={self.val_fraction}: give only one")
        return self

    def recorded(self) -> dict[str, Any]:
        """Return the settings that decide what the dataset holds, and its whole input, as JSON for its manifest."""
        kept = self.model_dump(mode="json", include={"data", "tokenizer", "shard_tokens", "dedup"})
        fraction = self.data.usual_val_fraction if self.val_fraction is None else self.val_fraction
        split = {"val_tokens": self.val_tokens} if self.val_tokens else {"val_fraction": fraction}
        return {**kept, **split, "input": self.data.inputs()}


def prepare(config: PrepareConfig) -> Manifest | None:
    """Make the dataset `config.out_dir`, or go on with it. With num_tasks, write only the parts of one task: None.

    If documents are too few for two splits, they are cut into pieces, which fall into both.

    Raises:
        UserError: the folder holds something else, or the dataset cannot be made.
    """
    try:
        return _prepare(config)
    except EmptySplit as error:
        if isinstance(config.data, Task):  # its documents are questions with their answers
            raise
        cut = f"documents are cut into pieces of about {error.piece:,} characters, which count as documents"
        say(f"{str(error).partition(':')[0]}: {cut}")
        return _prepare(config, error.piece)


def _prepare(config: PrepareConfig, piece: int | None = None) -> Manifest | None:
    is_task = config.num_tasks > 1
    source, folder = _share(config) if is_task else (config.data, partial_dir(config.out_dir))
    prepared = config.recorded()
    file = getattr(config.tokenizer, "path", None)
    found = build_tokenizer(config.tokenizer) if file is not None and file.exists() else None  # it may have changed
    sha256 = found.sha256 if found else None
    if not is_task and (manifest := existing(config.out_dir, prepared, sha256)) is not None:
        return manifest
    tokenizer = found or build_tokenizer(config.tokenizer)
    tokenizer_id = TokenizerId(**{name: getattr(tokenizer, name) for name in TokenizerId.model_fields})
    with writing(folder):
        plan = start(folder, Plan(prepared=prepared, tokenizer=tokenizer_id, piece=piece), tokenizer)
        if not (folder / FINISHED).exists():
            _write_parts(config, source.in_pieces(plan.piece), folder)
        if is_task:
            say(f"{folder} is ready: when all {config.num_tasks} tasks are, run scripts/merge_dataset.py")
            return None
        try:
            return join([folder], plan, config.out_dir)
        except Unusable:
            remove(folder)  # so that the same command works with another val_fraction or input
            raise


def part_dir(out_dir: Path, task_index: int, num_tasks: int) -> Path:
    """Return where a task puts its parts."""
    return out_dir / f"task-{task_index:05}-of-{num_tasks:05}"


def _share(config: PrepareConfig) -> tuple[Source, Path]:
    """Return what this task reads and where it puts it."""
    num_tasks, task_index = config.num_tasks, config.task_index
    if not isinstance(config.data, FileSource):
        raise UserError(f"num_tasks={num_tasks} shares out files, data={config.data.name} has none: use data=jsonl")
    files = len(config.data.paths())
    if files < num_tasks:
        raise UserError(f"num_tasks={num_tasks} is more than the input's files, {files}: use at most num_tasks={files}")
    if (config.out_dir / MANIFEST).exists():
        raise UserError(f"out_dir={config.out_dir} is a dataset: choose another folder for the parts of num_tasks")
    return config.data.share(task_index, num_tasks), part_dir(config.out_dir, task_index, num_tasks)


def _write_parts(config: PrepareConfig, source: Source, folder: Path) -> None:
    """Tokenize what follows the parts that are in the folder."""
    parts = read_parts(folder)
    after = parts[-1].position if parts else None
    if after:
        documents = sum(part.documents for part in parts)
        say(f"going on with {folder}: {documents:,} documents have been read, up to {after.input}:{after.number}")
    with contextlib.closing(_read(config, source, folder, after)) as batches:
        for number in itertools.count(len(parts)):
            if not write_part(folder, number, batches):
                break
    write_atomic(folder / FINISHED, "")


def _read(config: PrepareConfig, source: Source, folder: Path, after: Position | None) -> Generator[Batch, None, None]:
    """Yield the batches after a position and show the progress."""
    read = documents = utf8_bytes = 0

    def count(n_bytes: int) -> None:
        nonlocal read
        read += n_bytes

    workers = config.workers or os.cpu_count() or 1
    batches = encode_all(source, folder / TOKENIZER, workers, on_error=config.on_error, seen=count, after=after)
    if after is None:
        batches = _with_text(batches, config.data)
    if (first := next(batches, None)) is None:
        return
    started = time.monotonic()  # only now: a run that goes on first reads up to where it was
    sizes = source.inputs().values()
    with Track("reading, bytes", None if None in sizes else sum(filter(None, sizes)), read) as track:
        for batch in itertools.chain([first], batches):
            yield batch
            encoded = [item.utf8_bytes for item in batch.items if isinstance(item, Encoded)]
            documents += len(encoded)
            utf8_bytes += sum(encoded)
            rate = utf8_bytes / 1e6 / (time.monotonic() - started)
            note = f"{documents:,} documents, {utf8_bytes / 1e6:,.0f} MB of text, {rate:.1f} MB/s"
            track.advance(read - track.done, note)


def _with_text(batches: Iterator[Batch], source: Source) -> Iterator[Batch]:
    """Yield the batches of a source, unless most of its first documents have no text.

    Raises:
        UserError: most have none.
    """
    items: list[Encoded | Skipped] = []
    for batch in batches:
        if len(items) < _CHECKED_ITEMS:
            items += batch.items
            if len(items) >= _CHECKED_ITEMS:
                lacking = [item.where for item in items if isinstance(item, Skipped) and item.reason == NO_TEXT]
                check_text(source.model_dump(), len(lacking), len(items), next(iter(lacking), None), "the first ")
        yield batch
