"""Finishes a dataset: names the shards of all spans, writes the manifest, renames the folder."""

import os
from collections import Counter
from pathlib import Path

from rich.table import Table

from common.command_line import format_options
from common.console import count, say, show_table, table_of, warn
from common.files import make_directory, sync_directory, write_json
from common.settings import UserError, escape_controls
from data.prepare.files import list_some
from data.prepare.items import REMEDIES
from data.prepare.spans import Plan, Span, remove_spans, span_dir, spans_error
from data.shards import (
    MANIFEST,
    TOKENIZER,
    Manifest,
    Split,
    SplitName,
    name_shard,
    read_manifest,
    sum_counts,
)

_FEW = 5000  # tokens of validation, below which the loss is rough
_LARGE = 100_000_000  # tokens that the default model needs


def finish_dataset(folder: Path, plan: Plan, spans: list[Span], out_dir: Path) -> Manifest:
    """Make the dataset `out_dir` from all spans in `folder`.

    A process that is stopped here leaves shards under old and new names; the next process
    continues.

    Raises:
        UserError: nothing is left to train or to validate on, or a span is damaged.
    """
    manifest, places = _join(plan, folder, spans)
    first_skipped: dict[str, str] = {}
    for span in reversed(spans):
        first_skipped |= {reason: place for reason, (_, place) in span.skipped.items()}
    try:
        _check(manifest, plan, first_skipped)
    except UserError:
        remove_spans(folder)  # so that the same command works with another val_fraction or input
        raise
    _move(folder, places | {TOKENIZER: folder / TOKENIZER}, manifest, out_dir)
    _summarize(out_dir, manifest, first_skipped)
    unread = sum((Counter(span.unread) for span in spans), Counter[str]())
    if unread:
        listed = ", ".join(f"{key} in {count(n, 'conversation')}" for key, n in unread.items())
        warn(f"not read, although it changes what is said: {listed}")
    return manifest


def _move(folder: Path, places: dict[str, Path], manifest: Manifest, out_dir: Path) -> None:
    """Give files their names in the dataset, write its manifest, and rename its folder."""
    directory = make_directory(folder / "dataset", "out_dir")
    sync_directory(folder)
    for name, source in places.items():
        try:
            os.replace(source, directory / name)
        except FileNotFoundError:  # it has been moved, or lost
            if not (directory / name).exists():
                raise spans_error(folder, f"{source.relative_to(folder)} is missing") from None
    sync_directory(directory)
    write_json(directory / MANIFEST, manifest.model_dump(mode="json"))
    try:
        read_manifest(directory)
    except UserError as error:
        raise spans_error(folder, error) from None
    os.replace(directory, out_dir.resolve())
    sync_directory(out_dir.resolve().parent)
    remove_spans(folder)


def _join(plan: Plan, folder: Path, spans: list[Span]) -> tuple[Manifest, dict[str, Path]]:
    """Return the manifest of all spans, and the present places of the dataset's files."""
    set_names: dict[str, int] = {}
    splits: dict[SplitName, Split] = {
        "train": Split(sets={}, shards=[]),
        "val": Split(sets={}, shards=[]),
    }
    skipped: Counter[str] = Counter()
    places: dict[str, Path] = {}
    for number, span in enumerate(spans):
        directory = span_dir(folder, number)
        for reason, (n_skipped, _) in span.skipped.items():
            skipped[reason] += n_skipped
        # A span numbers its sets from 0; a dataset, over all spans.
        set_numbers = [set_names.setdefault(name, len(set_names)) for name in span.set_names]
        # Number the shards of a split over all spans, and add up its sets.
        for split_name, split in span.splits.items():
            whole = splits[split_name]
            (shard,) = split.shards
            file = name_shard(split_name, len(whole.shards))
            renamed = shard.model_copy(update={"file": file, "sets": set_numbers})
            places[file] = directory / shard.file
            places[renamed.index_file] = directory / shard.index_file
            whole.shards.append(renamed)
            for set_name, amount in split.sets.items():
                before = whole.sets.get(set_name, sum_counts([]))
                whole.sets[set_name] = sum_counts([before, amount])
    # List sets by name.
    for name, whole in splits.items():
        splits[name] = Split(sets=dict(sorted(whole.sets.items())), shards=whole.shards)
    manifest = Manifest(
        tokenizer=plan.tokenizer,
        inputs=list(plan.prepared["input"]),
        set_names=list(set_names),
        splits=splits,
        skipped=dict(sorted(skipped.items())),
        prepared=plan.prepared,
    )
    return manifest, places


def _check(manifest: Manifest, plan: Plan, first_skipped: dict[str, str]) -> None:
    """Raise UserError unless there are documents to train on and to validate on."""
    n_val = manifest.splits["val"].total.documents
    n_documents = n_val + manifest.splits["train"].total.documents
    if 0 < n_val < n_documents:
        return
    documents = count(n_documents, "document")
    reasons = Counter(manifest.skipped).most_common()
    if reasons and n_documents <= sum(manifest.skipped.values()):
        why = ", ".join(f"{n:,} x {reason}, first {first_skipped[reason]}" for reason, n in reasons)
        remedy = REMEDIES.get(reasons[0][0], "correct them, or check data.path")
        raise UserError(f"{why}: {remedy}; {documents} left to train and to validate on")
    if n_documents < 2:
        raise UserError(f"{documents} is too few to train and to validate on: add documents")
    rules = ("val_tokens", "val_fraction", "val_inputs")
    rule = next(f"{key}={plan.prepared[key]}" for key in rules if key in plan.prepared)
    empty = "train" if n_val else "val"
    change = "smaller" if n_val else "larger"
    raise UserError(
        f"none of {documents} went to '{empty}' with {rule} (skipped: {manifest.skipped}): "
        f"give a {change} val_fraction or val_tokens, or add documents with other texts"
    )


def _summarize(out_dir: Path, manifest: Manifest, first_skipped: dict[str, str]) -> None:
    show_table(build_sets_table(manifest))
    for reason, n in manifest.skipped.items():
        remedy = f": {REMEDIES[reason]}" if reason in REMEDIES else ""
        say(f"skipped {n:,} x {reason} (first: {first_skipped[reason]}){remedy}")
    val_inputs = manifest.prepared.get("val_inputs")
    if val_inputs:
        say(f"for validation: {list_some(val_inputs)}; val_fraction splits all texts instead")
    n_val_tokens = manifest.splits["val"].total.tokens
    if n_val_tokens < _FEW:
        warn(
            f"only {n_val_tokens:,} tokens are for validation, so its loss is rough: "
            "give a larger val_fraction or val_tokens, and another out_dir"
        )
    n_written = sum(split.total.documents for split in manifest.splits.values())
    n_skipped = sum(manifest.skipped.values())
    say(
        f"{n_written + n_skipped:,} documents in the input: {n_written:,} written, "
        f"{n_skipped:,} skipped"
    )
    settings = {"dataset_dir": str(out_dir)}
    say("\nNext: see some of its text, and train on it")
    say(f"  python scripts/inspect_dataset.py {format_options(settings)} random=3")
    settings["run_dir"] = f"runs/{out_dir.name}"
    if manifest.tokenizer.markers:
        settings = {"experiment": "chat", "init_from": "runs/base"} | settings
    elif manifest.splits["train"].total.tokens < _LARGE:
        settings = {"experiment": "quickstart"} | settings
    say(f"  python train.py {format_options(settings)}")


def build_sets_table(manifest: Manifest) -> Table:
    """Return a table of the text in each set of each split, the largest first."""
    table = table_of(["split", "set"], ["documents", "tokens", "share, %", "bytes", "tokens/byte"])
    for name, split in manifest.splits.items():
        largest_first = sorted(split.sets.items(), key=lambda item: -item[1].tokens)
        for set_name, counts in [*largest_first, ("all", split.total)]:
            share = 100 * counts.tokens / max(1, split.total.tokens)
            rate = f"{counts.tokens / counts.utf8_bytes:.3f}" if counts.utf8_bytes else "no text"
            table.add_row(
                name,
                escape_controls(set_name),
                f"{counts.documents:,}",
                f"{counts.tokens:,}",
                f"{share:.2f}",
                f"{counts.utf8_bytes:,}",
                rate,
            )
        table.add_section()
    return table
