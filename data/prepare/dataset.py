"""Documents to a dataset directory: tokenized by workers, written as spans, and put together."""

import contextlib
import itertools
import math
import os
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from common.console import Track, count, say
from common.settings import JsonDict, Settings, UserError
from data.prepare.encode import Item, Skipped, encode_all
from data.prepare.finish import finish_dataset
from data.prepare.items import NO_CONVERSATION, NO_TEXT, OUT_OF_RANGE, REMEDIES, Position
from data.prepare.sources import (
    ChatSource,
    HubSource,
    Inputs,
    JsonlSource,
    StdlibSource,
    TextSource,
)
from data.prepare.spans import (
    Plan,
    begin_spans,
    is_whole,
    lock_spans,
    partial_dir,
    read_spans,
    remove_spans,
    write_spans,
)
from data.prepare.tokens import TokenSource
from data.shards import MANIFEST, TOKENIZER, Manifest, read_manifest
from data.tokenizers.build import GPT2Config, HFConfig, TokenizerConfig, build_tokenizer
from data.tokenizers.chat import ChatTokenizer
from data.tokenizers.interface import Tokenizer

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
    """The dataset directory to make.

    Until it is whole, it is written in the folder of this name with .partial.
    """
    val_fraction: float | None = Field(gt=0, lt=1)
    """The share of documents for the validation split.

    null: the files named for it; if there are none, 0.005 for the hub and for 100 MB or more of
    jsonl, tokens or hf, else 0.05.
    """
    val_tokens: PositiveInt | None
    """In place of val_fraction: the documents with the first so many tokens are for validation."""
    shard_tokens: PositiveInt
    """A pair of shards, one a split, is full with the document that reaches this many tokens."""
    on_error: Literal["skip", "stop"]
    """What to do with documents that cannot be read.

    skip: count them by reason. stop: end with an error.
    """
    workers: PositiveInt | None
    """Processes that tokenize; null: one for every CPU.

    The dataset does not depend on their number.
    """

    @model_validator(mode="after")
    def _check_folders(self) -> "PrepareConfig":
        if self.val_tokens and self.val_fraction:
            raise ValueError(
                f"val_tokens={self.val_tokens} replaces val_fraction={self.val_fraction}: "
                "give only one"
            )
        folder = Path(self.data.path) if isinstance(self.data, HubSource) else None
        if folder and folder.is_dir() and self.out_dir.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"out_dir={self.out_dir} is in data.path={folder}, which is read: "
                "choose one outside"
            )
        return self

    def open_tokenizer(self) -> Tokenizer:
        """Build the tokenizer, with markers if documents are conversations.

        Raises:
            UserError: its file is invalid.
        """
        tokenizer = build_tokenizer(self.tokenizer)
        return ChatTokenizer(tokenizer) if self.data.is_chat else tokenizer

    def recorded(self) -> JsonDict:
        """Return what decides the content of the dataset, as JSON for its manifest.

        It is the settings of data, tokenizer and split, and the names and sizes of all inputs.
        """
        inputs = self.data.inputs()
        settings = self.model_dump(mode="json", include={"data", "tokenizer", "shard_tokens"})
        return {**settings, **self._split_rule(inputs), "input": inputs}

    def _split_rule(self, inputs: Inputs) -> JsonDict:
        """Return the setting that decides the split."""
        if self.val_tokens:
            return {"val_tokens": self.val_tokens}
        if self.val_fraction:
            return {"val_fraction": self.val_fraction}
        val_names = self.data.val_inputs(inputs)
        if val_names:
            return {"val_inputs": val_names}
        size = sum(math.inf if n_bytes is None else n_bytes for n_bytes in inputs.values())
        is_small = size < _LARGE or self.data.name in ("stdlib", "text", "chat")
        return {"val_fraction": 0.05 if is_small else 0.005}


def prepare_dataset(config: PrepareConfig) -> Manifest:
    """Make the dataset `config.out_dir`, or continue it.

    Raises:
        UserError: the folder holds something else, or the dataset cannot be made.
    """
    out_dir = config.out_dir
    folder = partial_dir(out_dir)
    prepared = config.recorded()
    if (out_dir / MANIFEST).exists():
        return _existing(config, prepared, folder)
    is_empty_folder = out_dir.is_dir() and not any(out_dir.iterdir())
    if out_dir.exists() and not is_empty_folder:
        raise UserError(f"out_dir={out_dir} exists and is not a dataset: choose another folder")
    tokenizer = config.open_tokenizer()
    plan = Plan(prepared=prepared, tokenizer=tokenizer.id)
    with lock_spans(folder):
        begin_spans(folder, plan, tokenizer)
        return _write(config, plan, folder)


def _existing(config: PrepareConfig, prepared: JsonDict, folder: Path) -> Manifest:
    """Return the manifest of the existing dataset.

    Raises:
        UserError: it was made with other settings.
    """
    manifest = read_manifest(config.out_dir)
    tokenizer = manifest.tokenizer
    # The dataset has a copy of the tokenizer: its file need not be there.
    named = config.tokenizer
    if isinstance(named, GPT2Config | HFConfig) and named.path and named.path.exists():
        tokenizer = config.open_tokenizer().id
    before = Plan(prepared=manifest.prepared, tokenizer=manifest.tokenizer)
    changes = before.changes(Plan(prepared=prepared, tokenizer=tokenizer))
    if changes:
        raise UserError(
            f"out_dir={config.out_dir} already holds another dataset (made with {changes}): "
            "choose another out_dir or delete it"
        )
    say(f"{config.out_dir} is already prepared with these settings; delete it to prepare it again")
    remove_spans(folder)  # left by a run that was stopped at its very end
    return manifest


def _write(config: PrepareConfig, plan: Plan, folder: Path) -> Manifest:
    """Write the missing spans, and finish the dataset."""
    spans = read_spans(folder)
    if spans:
        say(f"continuing {folder}, which has {count(len(spans), 'span')}")
    if not is_whole(spans):
        sizes = plan.prepared["input"].values()
        with Track("reading, bytes", None if None in sizes else sum(sizes)) as track:
            after = spans[-1].last if spans else None
            items = _read(config, plan, folder, after, track)
            with contextlib.closing(items):
                spans = write_spans(folder, plan, spans, items)
    return finish_dataset(folder, plan, spans, config.out_dir)


def _read(
    config: PrepareConfig, plan: Plan, folder: Path, after: Position | None, track: Track
) -> Generator[Item, None, None]:
    """Yield the items after a position.

    Raises:
        UserError: most of the first items that this process reads have no text, or ids out of
            range; or one cannot be read and `on_error` is "stop".
    """
    source = config.data
    if isinstance(source, TokenSource):
        source = source.ended_by(plan.tokenizer.eot_id)
    raws = source.documents([*plan.prepared["input"]], track.advance, after)
    workers = config.workers or os.cpu_count() or 1
    is_start = after is None
    n_items = 0
    first_skipped: list[Skipped] = []
    encoded = encode_all(source, raws, folder / TOKENIZER, workers)
    for items in itertools.chain(encoded, [[]]):  # [] is the end of the input
        n_items += len(items)
        track.advance(0, f"{n_items:,} documents")
        # With on_error=stop, the first unreadable item ends the run.
        skipped = [item for item in items if isinstance(item, Skipped)]
        if skipped and config.on_error == "stop":
            reason = skipped[0].reason
            raise UserError(
                f"{skipped[0].where}: {reason}: {REMEDIES.get(reason, 'correct it')}; "
                "or skip such items with on_error=skip"
            )
        # Most of the first items lost is a wrong setting: say so before hours of reading.
        if is_start:
            first_skipped += skipped
            if not items or n_items >= _CHECKED_ITEMS:
                _check_first(config, first_skipped, n_items)
                is_start = False
        yield from items


def _check_first(config: PrepareConfig, skipped: list[Skipped], n_items: int) -> None:
    """Raise UserError if a wrong setting is why most of the first items were skipped."""
    for reason in (NO_TEXT, NO_CONVERSATION, OUT_OF_RANGE):
        places = [item.where for item in skipped if item.reason == reason]
        if 2 * len(places) > n_items:
            problem = reason
            if reason == NO_TEXT:
                problem = f"data.text_field={config.data.model_dump()['text_field']} is missing"
            raise UserError(
                f"{problem} in {len(places):,} of the first {n_items:,} documents "
                f"(first: {places[0]}): {REMEDIES[reason]}"
            )
