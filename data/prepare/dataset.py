"""Documents to a dataset directory: tokenized by worker processes, written as spans, and put together."""

import contextlib
import itertools
import math
import os
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from common.console import Track, count, say
from common.settings import JsonDict, Settings, UserError
from data.chat import ChatTokenizer
from data.prepare.encode import Encoded, Item, Skipped, encode_all
from data.prepare.finish import finish
from data.prepare.items import NO_TEXT, OUT_OF_RANGE, REMEDIES, Position
from data.prepare.sources import (
    ChatSource,
    HubSource,
    JsonlSource,
    Source,
    StdlibSource,
    TextSource,
)
from data.prepare.spans import (
    Plan,
    Unfair,
    begin,
    is_whole,
    partial_dir,
    read_spans,
    remove,
    write_group,
    writing,
)
from data.prepare.tokens import TokenSource, val_inputs
from data.shards import MANIFEST, TOKENIZER, Manifest, read_manifest
from data.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer

SourceConfig = Annotated[
    StdlibSource | TextSource | JsonlSource | ChatSource | TokenSource | HubSource,
    Field(discriminator="name"),
]

_LARGE = 100_000_000  # bytes of input, of which 0.005 are enough to validate on
_CHECKED_ITEMS = 10_000  # after so many, a reason that loses most documents is an error


class PrepareConfig(Settings, defaults="prepare"):
    """Settings of scripts/prepare_data.py."""

    data: SourceConfig
    """Where documents come from."""
    tokenizer: TokenizerConfig
    """How their text becomes token ids."""
    out_dir: Path
    """The dataset directory to make. Until it is whole, all tasks write into the folder of this name with .partial."""
    val_fraction: float | None = Field(gt=0, lt=1)
    """The share of documents for the validation split. null: 0.005 for the hub and for 100 MB or more of jsonl or
    tokens, else 0.05."""
    val_tokens: PositiveInt | None
    """In place of val_fraction: the documents with the first so many tokens of the input are for validation."""
    shard_tokens: PositiveInt
    """A pair of shards, one for each split, is full with the document that reaches this number of tokens."""
    on_error: Literal["skip", "stop"]
    """What to do with documents that cannot be read. skip: count them by reason. stop: end with an error."""
    workers: PositiveInt | None
    """Processes that tokenize; the dataset does not depend on their number. null: one for every CPU."""
    num_tasks: PositiveInt
    """The number of machines that share the work. Each takes its share of the groups of 1 GiB of input files."""
    task_index: NonNegativeInt
    """The number of this machine, from 0."""

    @model_validator(mode="after")
    def _check_task(self) -> "PrepareConfig":
        if self.task_index >= self.num_tasks:
            raise ValueError(
                f"task_index={self.task_index} is out of range: give one from 0 to {self.num_tasks - 1}"
            )
        if self.val_tokens and self.val_fraction:
            raise ValueError(
                f"val_tokens={self.val_tokens} replaces val_fraction={self.val_fraction}: give only one"
            )
        folder = Path(self.data.path) if isinstance(self.data, HubSource) else None
        if folder and folder.is_dir() and self.out_dir.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"out_dir={self.out_dir} is in data.path={folder}, which is read: choose one outside"
            )
        return self

    def open_tokenizer(self) -> Tokenizer:
        """Build the tokenizer, with markers if documents are conversations; UserError if its file is invalid."""
        tokenizer = build_tokenizer(self.tokenizer)
        return ChatTokenizer(tokenizer) if self.data.is_chat else tokenizer

    def recorded(self) -> JsonDict:
        """Return the settings that decide what the dataset holds, and its whole input, as JSON for its manifest."""
        kept = self.model_dump(mode="json", include={"data", "tokenizer", "shard_tokens"})
        inputs = self.data.inputs()
        size = sum(math.inf if n_bytes is None else n_bytes for n_bytes in inputs.values())
        usual = self.data.usual_val_fraction if size >= _LARGE else Source.usual_val_fraction
        split: JsonDict = {"val_fraction": self.val_fraction or usual}
        if self.val_tokens:
            split = {"val_tokens": self.val_tokens}
        elif (
            self.val_fraction is None
            and isinstance(self.data, TokenSource)
            and (found := val_inputs(inputs))
        ):
            split = {"val_inputs": found}
        return {**kept, **split, "input": inputs}


def prepare(config: PrepareConfig) -> Manifest | None:
    """Make the dataset `config.out_dir`, or continue it; None if other tasks have not written their share yet.

    If there are too few documents for a fair split, cut them into pieces.

    Raises:
        UserError: the folder holds something else, or the dataset cannot be made.
    """
    prepared, folder, out_dir = config.recorded(), partial_dir(config.out_dir), config.out_dir
    if (out_dir / MANIFEST).exists():
        return _existing(config, prepared, folder)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UserError(f"out_dir={out_dir} exists and is not a dataset: choose another folder")
    tokenizer = config.open_tokenizer()
    plan = Plan(prepared=prepared, tokenizer=tokenizer.id)
    if config.num_tasks > (n := len(plan.groups())):
        what = f"num_tasks={config.num_tasks} is more than the groups of 1 GiB that the input files make"
        raise UserError(f"{what}: use at most num_tasks={n}")
    with writing(folder, config.task_index):
        plan = begin(folder, plan, tokenizer)
        try:
            manifest = _write(config, plan, folder)
        except Unfair as error:
            cut = f"they are cut into pieces of about {error.piece:,} characters or ids, which count as documents"
            say(
                f"too few documents for a validation split of val_fraction={prepared['val_fraction']:g}: {cut}"
            )
            remove(folder)
            plan = begin(folder, plan.model_copy(update={"piece": error.piece}), tokenizer)
            manifest = _write(config, plan, folder)
    if manifest is None:
        done = f"task_index={config.task_index} of num_tasks={config.num_tasks} is done"
        say(f"{done}; {config.out_dir} is ready when all are. If all are, run one of them again")
    return manifest


def _existing(config: PrepareConfig, prepared: JsonDict, folder: Path) -> Manifest:
    """Return the manifest of the existing dataset; raise UserError if its settings differ from `config`."""
    manifest, file = read_manifest(config.out_dir), getattr(config.tokenizer, "path", None)
    tokenizer = (
        config.open_tokenizer().id if file and file.exists() else manifest.tokenizer
    )  # which has a copy
    before = Plan(prepared=manifest.prepared, tokenizer=manifest.tokenizer)
    if changes := before.changes(Plan(prepared=prepared, tokenizer=tokenizer)):
        what = f"out_dir={config.out_dir} already holds another dataset (made {changes})"
        raise UserError(f"{what}: choose another out_dir or delete it")
    say(f"{config.out_dir} is already prepared with these settings; delete it to prepare it again")
    remove(folder)  # left by a run that was stopped at its very end
    return manifest


def _write(config: PrepareConfig, plan: Plan, folder: Path) -> Manifest | None:
    """Write the missing spans of this task. Finish the dataset if all spans of all tasks exist."""
    groups, sizes = plan.groups(), plan.prepared["input"]
    first = config.task_index * len(groups) // config.num_tasks
    stop = (config.task_index + 1) * len(groups) // config.num_tasks
    found = {group: read_spans(folder, group) for group in range(first, stop)}
    if n_spans := sum(map(len, found.values())):
        say(f"continuing {folder}, which has {count(n_spans, 'span')} of this task")
    rest = [
        sizes[name]
        for group, spans in found.items()
        if not is_whole(spans)
        for name in groups[group]
    ]
    with _Reading("reading, bytes", None if None in rest else sum(rest)) as track:
        for group, spans in found.items():
            if not is_whole(spans):
                after = spans[-1].last if spans else None
                with contextlib.closing(
                    _read(config, plan, folder, groups[group], after, track)
                ) as items:
                    write_group(folder, plan, group, spans, items)
    return finish(folder, plan, config.out_dir)


class _Reading(Track):
    """Shows how many bytes of the input have been read, and how many documents they hold."""

    items = 0

    def seen(self, n_bytes: int) -> None:
        """Count bytes of the input."""
        self.done += n_bytes


def _read(
    config: PrepareConfig,
    plan: Plan,
    folder: Path,
    inputs: list[str],
    after: Position | None,
    track: _Reading,
) -> Generator[Item, None, None]:
    """Yield the items of some inputs after a position.

    Raises:
        UserError: most of the first items that this process reads have no text, or ids out of range; or one cannot be
            read and `on_error` is "stop".
    """
    is_first = after is None and not track.items
    may_end = is_first and not plan.piece and getattr(config.tokenizer, "eot_id", 0) is None
    lost: dict[str, list[str]] = {NO_TEXT: [], OUT_OF_RANGE: []}
    workers = config.workers or os.cpu_count() or 1
    source = (
        config.data.ended_by(plan.tokenizer.eot_id)
        if isinstance(config.data, TokenSource)
        else config.data
    )
    raws = source.documents(track.seen, after, inputs)
    encoded = encode_all(source, raws, folder / TOKENIZER, workers, plan.piece)
    for items in itertools.chain(encoded, [[]]):
        track.items += len(items)
        track.advance(0, f"{track.items:,} documents")
        skipped = [item for item in items if isinstance(item, Skipped)]
        if skipped and config.on_error == "stop":
            first = skipped[0]
            remedy = REMEDIES.get(first.reason, "correct it")
            raise UserError(
                f"{first.where}: {first.reason}: {remedy}; or skip such items with on_error=skip"
            )
        if may_end and any(isinstance(item, Encoded) and item.was_ended for item in items):
            may_end = False
            what = f"id {plan.tokenizer.eot_id} ends documents: it is the default tokenizer.eot_id"
            say(
                f"{what}; if it is an ordinary id, raise tokenizer.n_vocab or give tokenizer.eot_id"
            )
        if is_first:
            is_first = bool(items) and track.items < _CHECKED_ITEMS
            for reason, places in lost.items():
                places += [item.where for item in skipped if item.reason == reason]
                if not is_first and 2 * len(places) > track.items:
                    field = f"data.text_field={config.data.model_dump()['text_field']} is missing"
                    what = (
                        f"{field if reason == NO_TEXT else reason} in {len(places):,} of the first"
                    )
                    what += f" {track.items:,} documents (first: {places[0]})"
                    raise UserError(f"{what}: {REMEDIES[reason]}")
        yield from items
