"""Documents to a dataset directory: tokenised by worker processes, written in input order, renamed into place."""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt

from common.console import Track, say
from common.files import make_directory, sync_directory
from common.settings import Settings, UserError, differences
from data.encode import Batch, Skipped, encode_all
from data.shards import (
    MANIFEST,
    MAX_SETS,
    TOKENIZER,
    Counts,
    Manifest,
    Split,
    SplitName,
    TokenizerId,
    read_manifest,
    write_manifest,
)
from data.sources import SourceConfig, Unreadable
from data.tokenizer import TokenizerConfig, build_tokenizer, save_tokenizer
from data.writer import Names, ShardWriter


class PrepareConfig(Settings):
    """What scripts/prepare_data.py makes a dataset from."""

    data: SourceConfig
    """Where documents come from."""
    tokenizer: TokenizerConfig
    """What turns them into token ids."""
    out_dir: Path
    """The dataset directory to make."""
    val_fraction: float | None = Field(default=None, gt=0, lt=1)
    """The share of documents for the validation split. null: 0.05 for stdlib and text, 0.005 for jsonl and pile."""
    shard_tokens: PositiveInt = 100_000_000
    """A shard is full with the document that reaches this number of tokens."""
    workers: PositiveInt | None = None
    """Processes that tokenise; the dataset is the same for any number. null: one for every CPU."""

    @property
    def fraction(self) -> float:
        """val_fraction, or what is usual for the source."""
        return self.data.usual_val_fraction if self.val_fraction is None else self.val_fraction

    def recorded(self) -> dict[str, Any]:
        """The settings that decide what the dataset holds, as JSON: its manifest keeps them."""
        kept = self.model_dump(mode="json", include={"data", "tokenizer", "shard_tokens"})
        return {**kept, "val_fraction": self.fraction}


def prepare(config: PrepareConfig) -> Manifest:
    """Make the dataset `config.out_dir`, or return at once if it is there, made with the same settings.

    Raises:
        UserError: the folder holds something else, or no text was left to train or validate on.
    """
    out_dir = config.out_dir.resolve()
    if (out_dir / MANIFEST).exists():
        return _keep_existing(config)
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise UserError(f"out_dir={config.out_dir} exists and is not a dataset: choose another folder")
    started = time.monotonic()
    make_directory(out_dir.parent, "out_dir")
    partial_dir = out_dir.with_name(out_dir.name + ".partial")
    shutil.rmtree(partial_dir, ignore_errors=True)  # of a run that was killed
    partial_dir.mkdir()
    skipped = Skipped()
    try:
        manifest = _write_dataset(config, partial_dir, skipped)
        os.replace(partial_dir, out_dir)
    finally:
        shutil.rmtree(partial_dir, ignore_errors=True)
    sync_directory(out_dir.parent)
    _summarize(manifest, skipped, config.out_dir, time.monotonic() - started)
    return manifest


def _keep_existing(config: PrepareConfig) -> Manifest:
    manifest = read_manifest(config.out_dir)
    different = differences(manifest.prepared, config.recorded())
    if different:
        changes = ", ".join(f"{key}={there!r} (now {here!r})" for key, (there, here) in different.items())
        raise UserError(f"out_dir={config.out_dir} was made with {changes}: choose another out_dir or delete it")
    say(f"{config.out_dir} is already prepared with these settings, its input not read again; delete it to do so")
    return manifest


def _write_dataset(config: PrepareConfig, directory: Path, skipped: Skipped) -> Manifest:
    tokenizer = build_tokenizer(config.tokenizer)
    save_tokenizer(tokenizer, directory / TOKENIZER)
    progress = Progress()
    encoded = encode_all(
        config.data, directory / TOKENIZER, config.fraction, config.workers or os.cpu_count() or 1, seen=progress.add
    )
    set_names, inputs = Names("sets", MAX_SETS), Names("inputs", 2**32)
    with (
        Track("reading, bytes", config.data.size()) as track,
        ShardWriter(directory, "train", tokenizer.n_vocab, config.shard_tokens, set_names, inputs) as train,
        ShardWriter(directory, "val", tokenizer.n_vocab, config.shard_tokens, set_names, inputs) as val,
    ):
        _write_shards(progress.show(encoded, track), train, val, skipped)
        splits: dict[SplitName, Split] = {"train": train.finish(), "val": val.finish()}
    _check_not_empty(splits, config.fraction, skipped)
    manifest = Manifest(
        tokenizer=TokenizerId(name=tokenizer.name, n_vocab=tokenizer.n_vocab, sha256=tokenizer.sha256),
        inputs=inputs.names,
        set_names=set_names.names,
        splits=splits,
        skipped=dict(sorted(skipped.counts.items())),
        prepared=config.recorded(),
    )
    write_manifest(directory, manifest)
    return manifest


def _write_shards(encoded: Iterable[Batch], train: ShardWriter, val: ShardWriter, skipped: Skipped) -> None:
    for batch in encoded:
        for item in batch.items:
            if isinstance(item, Unreadable):
                skipped.add(item)
                continue
            writer = val if item.split == "val" else train
            writer.append(item.ids, item.set_name, item.utf8_bytes, item.input, item.number)


class Progress:
    """How far the input has been read, and how fast its text is written."""

    def __init__(self) -> None:
        self.read = self.documents = self.utf8_bytes = 0
        self.started = time.monotonic()

    def add(self, n_bytes: int) -> None:
        """So many more bytes of the input have been read."""
        self.read += n_bytes

    def show(self, encoded: Iterable[Batch], track: Track) -> Iterator[Batch]:
        """Pass batches on, and show each on its way."""
        for batch in encoded:
            yield batch
            documents = [item for item in batch.items if not isinstance(item, Unreadable)]
            self.documents += len(documents)
            self.utf8_bytes += sum(document.utf8_bytes for document in documents)
            megabytes, seconds = self.utf8_bytes / 1e6, time.monotonic() - self.started
            note = f"{self.documents:,} documents, {megabytes:,.0f} MB of text, {megabytes / seconds:.1f} MB/s"
            track.advance(self.read - track.done, note)


def _check_not_empty(splits: dict[SplitName, Split], val_fraction: float, skipped: Skipped) -> None:
    documents = {name: split.total.documents for name, split in splits.items()}
    total = sum(documents.values())
    if total == 0:
        why = ", ".join(f"{count} x {reason}" for reason, count in skipped.counts.items()) or "it has no documents"
        raise UserError(f"the corpus is empty ({why}): check data.path")
    for name, count in documents.items():
        if count == 0:
            advice = f"try val_fraction={min(0.5, 10 / total):.2g} or add documents"
            raise UserError(f"none of {total} documents went to '{name}' with val_fraction={val_fraction}: {advice}")


def _summarize(manifest: Manifest, skipped: Skipped, out_dir: Path, seconds: float) -> None:
    say(f"{'split':<6}{'set':<24}{'documents':>12}{'tokens':>16}{'bytes':>18}{'tokens/byte':>13}")
    for name, split in manifest.splits.items():
        for set_name, counts in split.sets.items():
            _say_counts(name, set_name, counts)
        if len(split.sets) > 1:
            _say_counts(name, "all", split.total)
    for reason, count in manifest.skipped.items():
        say(f"skipped {count:,} x {reason} (first: {skipped.first[reason]})")
    megabytes = sum(split.total.utf8_bytes for split in manifest.splits.values()) / 1e6
    say(f"{out_dir} is ready: {megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / seconds:.1f} MB/s")


def _say_counts(split: str, set_name: str, counts: Counts) -> None:
    rate = counts.tokens / counts.utf8_bytes
    say(f"{split:<6}{set_name:<24}{counts.documents:>12,}{counts.tokens:>16,}{counts.utf8_bytes:>18,}{rate:>13.3f}")
