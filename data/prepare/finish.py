"""Finishes a dataset: names the shards of all spans, writes the manifest, renames the folder."""

import os
from collections import Counter
from pathlib import Path

from rich.table import Table

from common.command_line import format_options
from common.console import count, say, show_table, table_of, warn
from common.files import make_directory, sync_directory, write_json
from common.settings import UserError, escape_controls
from data.prepare.files import some_of
from data.prepare.items import REMEDIES
from data.prepare.spans import Plan, Span, number_of, remove, span_dir, unusable
from data.shards import (
    MANIFEST,
    TOKENIZER,
    Counts,
    Manifest,
    Shard,
    Split,
    SplitName,
    read_manifest,
    shard_file,
    total_of,
)

_FEW = 5000  # tokens of validation, below which the loss is rough
_LARGE = 100_000_000  # tokens that the default model needs


def finish(folder: Path, plan: Plan, spans: list[Span], out_dir: Path) -> Manifest:
    """Make the dataset `out_dir` from all spans in `folder`.

    A process that is stopped here leaves shards under old and new names; the next process
    continues.

    Raises:
        UserError: nothing is left to train or to validate on, a span is damaged, or there are too
            many sets.
    """
    manifest, moves = _joined(plan, folder, spans)
    first_skipped = _first_skipped(spans)
    try:
        _check(manifest, plan, first_skipped)
    except UserError:
        remove(folder)  # so that the same command works with another val_fraction or input
        raise
    _move(folder, [*moves, (folder / TOKENIZER, TOKENIZER)], manifest, out_dir)
    _summarize(out_dir, manifest, first_skipped)
    _warn_of_unread(spans)
    return manifest


def _warn_of_unread(spans: list[Span]) -> None:
    """Name the keys of conversations that say more than was read."""
    counts: Counter[str] = Counter()
    for span in spans:
        counts.update(span.unread)
    if counts:
        listed = ", ".join(f"{key} in {count(n, 'conversation')}" for key, n in counts.items())
        warn(f"not read, although it changes what is said: {listed}")


def _first_skipped(spans: list[Span]) -> dict[str, str]:
    """Return where the first item was that was skipped for each reason."""
    places: dict[str, str] = {}
    for span in spans:
        for reason, (_, place) in span.skipped.items():
            places.setdefault(reason, place)
    return places


def _move(folder: Path, moves: list[tuple[Path, str]], manifest: Manifest, out_dir: Path) -> None:
    """Give files their names in the dataset, write its manifest, and rename its folder."""
    directory = make_directory(folder / "dataset", "out_dir")
    sync_directory(folder)
    for source, name in moves:
        try:
            os.replace(source, directory / name)
        except FileNotFoundError:  # it has been moved, or lost
            if not (directory / name).exists():
                raise unusable(folder, f"{source.relative_to(folder)} is missing") from None
    sync_directory(directory)
    write_json(directory / MANIFEST, manifest.model_dump(mode="json"))
    try:
        read_manifest(directory)
    except UserError as error:
        raise unusable(folder, error) from None
    os.replace(directory, out_dir.resolve())
    sync_directory(out_dir.resolve().parent)
    remove(folder)


def _joined(plan: Plan, folder: Path, spans: list[Span]) -> tuple[Manifest, list[tuple[Path, str]]]:
    """Return the manifest of all spans, and the names that their files get in the dataset.

    Raises:
        UserError: there are too many sets.
    """
    set_names: dict[str, int] = {}
    shards: dict[SplitName, list[Shard]] = {"train": [], "val": []}
    counts: dict[SplitName, dict[str, list[Counts]]] = {"train": {}, "val": {}}
    skipped: Counter[str] = Counter()
    moves: list[tuple[Path, str]] = []
    for number, span in enumerate(spans):
        directory = span_dir(folder, number)
        for reason, (n_skipped, _) in span.skipped.items():
            skipped[reason] += n_skipped
        set_numbers = [number_of(name, set_names) for name in span.set_names]
        for split_name, split in span.splits.items():
            for shard in split.shards:
                file = shard_file(split_name, len(shards[split_name]))
                renamed = shard.model_copy(update={"file": file, "sets": set_numbers})
                moves.append((directory / shard.file, renamed.file))
                moves.append((directory / shard.index_file, renamed.index_file))
                shards[split_name].append(renamed)
            for set_name, amount in split.sets.items():
                counts[split_name].setdefault(set_name, []).append(amount)
    splits: dict[SplitName, Split] = {}
    for split_name, amounts in counts.items():
        sets = {name: total_of(amounts[name]) for name in sorted(amounts)}
        splits[split_name] = Split(sets=sets, shards=shards[split_name])
    manifest = Manifest(
        tokenizer=plan.tokenizer,
        inputs=list(plan.prepared["input"]),
        set_names=list(set_names),
        splits=splits,
        skipped=dict(sorted(skipped.items())),
        prepared=plan.prepared,
    )
    return manifest, moves


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
    show_table(sets_table(manifest))
    for reason, n in manifest.skipped.items():
        remedy = f": {REMEDIES[reason]}" if reason in REMEDIES else ""
        say(f"skipped {n:,} x {reason} (first: {first_skipped[reason]}){remedy}")
    val_inputs = manifest.prepared.get("val_inputs")
    if val_inputs:
        say(f"for validation: {some_of(val_inputs)}; val_fraction splits all texts instead")
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


def sets_table(manifest: Manifest) -> Table:
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
