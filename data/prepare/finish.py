"""Finishes a dataset: names the shards of all spans, writes the manifest, and renames the folder."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from common.command_line import overrides
from common.console import say, show_table, warn
from common.files import make_directory, owned, sync_directory, write_json
from common.settings import UserError
from data.prepare.inspect import sets_table
from data.prepare.items import REMEDIES
from data.prepare.spans import (
    Plan,
    Span,
    damaged,
    is_whole,
    number_of,
    read_spans,
    remove,
    span_dir,
)
from data.shards import (
    MANIFEST,
    TOKENIZER,
    Counts,
    Manifest,
    Split,
    SplitName,
    read_manifest,
    shard_file,
    total_of,
)

_FEW = 5000  # tokens of validation, below which the loss is rough
_LARGE = 100_000_000  # tokens that the default model needs


def finish(folder: Path, plan: Plan, out_dir: Path) -> Manifest | None:
    """Make the dataset `out_dir` from the spans in `folder`; None if other tasks have not written all spans yet.

    A process that is stopped here leaves shards under old and new names; the next process continues.

    Raises:
        UserError: nothing is left to train or to validate on, a span is damaged, or there are too many sets.
    """
    make_directory(folder, "out_dir")  # another task may have removed it
    with owned(folder / "finish.lock", lambda: None):
        if (out_dir / MANIFEST).exists():  # another task was first
            return read_manifest(out_dir)
        groups = [read_spans(folder, group) for group in range(len(plan.groups()))]
        have = sum(span.tokens for span in groups[0])
        if len(groups) > 1 and is_whole(groups[0]) and have < plan.val_tokens:
            what = f"val_tokens={plan.val_tokens} is more than the first files have, of together 1 GiB: {have}"
            raise UserError(
                f"{what}: give a smaller val_tokens and another out_dir, or delete {folder}"
            )
        if not all(map(is_whole, groups)):
            return None
        spans = {
            span_dir(folder, group, number): span
            for group, found in enumerate(groups)
            for number, span in enumerate(found)
        }
        first = {
            reason: where
            for span in reversed(spans.values())
            for reason, (_, where) in span.skipped.items()
        }
        manifest, moves = _joined(plan, spans)
        try:
            _check(manifest, plan, first)
        except UserError:
            remove(folder)  # so that the same command works with another val_fraction or input
            raise
        directory = make_directory(folder / "dataset", "out_dir")
        sync_directory(folder)
        for source, name in [*moves, (folder / TOKENIZER, TOKENIZER)]:
            try:
                os.replace(source, directory / name)
            except FileNotFoundError:  # it has been moved, or lost
                if not (directory / name).exists():
                    raise damaged(folder, f"{source.relative_to(folder)} is missing") from None
        sync_directory(directory)
        write_json(directory / MANIFEST, manifest.model_dump(mode="json"))
        try:
            read_manifest(directory)
        except UserError as error:
            raise damaged(folder, error) from None
        os.replace(directory, out_dir.resolve())
        sync_directory(out_dir.resolve().parent)
        remove(folder)
    _summarize(out_dir, manifest, first)
    return manifest


def _joined(plan: Plan, spans: dict[Path, Span]) -> tuple[Manifest, list[tuple[Path, str]]]:
    """Return the manifest of all spans, and the names that their files get in the dataset.

    Raises:
        UserError: there are too many sets.
    """
    set_names: dict[str, int] = {}
    shards: dict[SplitName, list[Any]] = {"train": [], "val": []}
    counts: dict[SplitName, dict[str, list[Counts]]] = {"train": {}, "val": {}}
    skipped: Counter[str] = Counter()
    moves: list[tuple[Path, str]] = []
    for folder, span in spans.items():
        skipped.update({reason: count for reason, (count, _) in span.skipped.items()})
        numbers = [number_of(name, set_names) for name in span.set_names]
        for name, split in span.splits.items():
            for shard in split.shards:
                named = shard.model_copy(
                    update={"file": shard_file(name, len(shards[name])), "sets": numbers}
                )
                moves += [
                    (folder / shard.file, named.file),
                    (folder / shard.index_file, named.index_file),
                ]
                shards[name].append(named)
            for set_name, of_set in split.sets.items():
                counts[name].setdefault(set_name, []).append(of_set)
    sets = {
        name: {each: total_of(found) for each, found in sorted(counts[name].items())}
        for name in counts
    }
    manifest = Manifest(
        tokenizer=plan.tokenizer,
        inputs=list(plan.prepared["input"]),
        set_names=list(set_names),
        splits={name: Split(sets=sets[name], shards=shards[name]) for name in shards},
        skipped=dict(sorted(skipped.items())),
        prepared=plan.prepared,
    )
    return manifest, moves


def _check(manifest: Manifest, plan: Plan, first: dict[str, str]) -> None:
    """Check that there is something to train and to validate on.

    Raises:
        UserError: one of the splits has no documents.
    """
    counts = {name: split.total.documents for name, split in manifest.splits.items()}
    documents = sum(counts.values())
    if not documents:
        found = Counter(manifest.skipped).most_common()
        why = ", ".join(f"{n:,} x {reason}, first {first[reason]}" for reason, n in found)
        remedy = (
            REMEDIES.get(found[0][0], "correct them, or check data.path")
            if found
            else "check data.path"
        )
        raise UserError(f"the corpus is empty ({why or 'it has no documents'}): {remedy}")
    empty = next((name for name, n in counts.items() if not n), None)
    if empty and plan.val_tokens:
        what = f"all {documents} documents begin within val_tokens={plan.val_tokens}: none is left to train on"
        raise UserError(f"{what}: give a smaller val_tokens")
    if empty and "val_inputs" in plan.prepared:
        what = f"none of {documents} documents went to '{empty}': files with val in their names are for validation"
        raise UserError(
            f"{what} ({manifest.skipped}): check them, or give val_fraction to split all of them"
        )
    if empty:
        fraction = plan.prepared["val_fraction"]
        change = "larger" if empty == "val" else "smaller"
        remedy = f"give a {change} val_fraction, or add documents with other texts"
        raise UserError(
            f"none of {documents} documents went to '{empty}' with val_fraction={fraction}: {remedy}"
        )


def _summarize(out_dir: Path, manifest: Manifest, first: dict[str, str]) -> None:
    show_table(sets_table(manifest))
    for reason, count in manifest.skipped.items():
        remedy = f": {REMEDIES[reason]}" if reason in REMEDIES else ""
        say(f"skipped {count:,} x {reason} (first: {first[reason]}){remedy}")
    if val_inputs := manifest.prepared.get("val_inputs"):
        say(
            f"for validation: {len(val_inputs):,} of {len(manifest.inputs):,} files, those with val in their names"
        )
    if (n_tokens := manifest.splits["val"].total.tokens) < _FEW:
        remedy = "give a larger val_fraction or val_tokens, and another out_dir"
        warn(f"only {n_tokens:,} tokens are for validation, so its loss is rough: {remedy}")
    written = sum(split.total.documents for split in manifest.splits.values())
    skipped = sum(manifest.skipped.values())
    say(f"{written + skipped:,} documents in the input: {written:,} written, {skipped:,} skipped")
    small = {"experiment": "quickstart"} if manifest.splits["train"].total.tokens < _LARGE else {}
    if manifest.tokenizer.markers:
        small = {"experiment": "chat", "init_from": "runs/base"}
    dataset = {"dataset_dir": str(out_dir)}
    say("\nNext: see some of its text, and train on it")
    say(f"  python scripts/inspect_dataset.py {overrides(dataset)} random=3")
    say(f"  python train.py {overrides(small | dataset | {'run_dir': f'runs/{out_dir.name}'})}")
