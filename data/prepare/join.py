"""Joining parts to a dataset: duplicates are dropped, documents fall into splits, and shards are filled in order."""

import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import numpy as np

from common.console import Track, say, show_table
from common.files import sync_directory, write_json
from common.settings import UserError
from data.prepare.inspect import sets_table
from data.prepare.items import NO_TEXT, REMEDIES
from data.prepare.parts import RANKS, Part, Plan, changes_between, damaged, read_parts, remove
from data.prepare.writer import ShardWriter
from data.shards import MANIFEST, MAX_SETS, RECORD, TOKENIZER, Counts, Manifest, Split, SplitName, read_manifest
from data.tokenizer import load_tokenizer, save_tokenizer

_SPLITS: tuple[SplitName, ...] = get_args(SplitName)
_DUPLICATE = "duplicate document"
_SHORTEST_PIECE, _LONGEST_PIECE = 256, 16_384  # characters
_DOCUMENTS_AT_ONCE = 2**23  # whose digests are sorted together, which takes some 400 MB


class Unusable(UserError):
    """The corpus is empty, or leaves nothing to train or to validate on."""


class EmptySplit(Unusable):
    """All documents fell into one split, but cut into pieces of about `piece` characters they fall into both."""

    def __init__(self, message: str, piece: int) -> None:
        super().__init__(message)
        self.piece = piece


def partial_dir(out_dir: Path) -> Path:
    """Return where a dataset is written before it is whole."""
    out_dir = out_dir.resolve()
    return out_dir.with_name(out_dir.name + ".partial")


def existing(out_dir: Path, prepared: dict[str, Any], tokenizer: str | None) -> Manifest | None:
    """Return the manifest of the dataset `out_dir` if it exists and was made with these settings, None if it is absent.

    `tokenizer` is the sha256 of the tokenizer, if it is known.

    Raises:
        UserError: the folder holds something else.
    """
    if (out_dir / MANIFEST).exists():
        manifest = read_manifest(out_dir)
        before, now = {RANKS: manifest.tokenizer.sha256}, {RANKS: tokenizer or manifest.tokenizer.sha256}
        if changes := changes_between(manifest.prepared | before, prepared | now):
            raise UserError(f"out_dir={out_dir} was made with {changes}: choose another out_dir or delete it")
        say(f"{out_dir} is already prepared with these settings; delete it to prepare it again")
        remove(partial_dir(out_dir))  # left by a run that was stopped at its very end
        return manifest
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UserError(f"out_dir={out_dir} exists and is not a dataset: choose another folder")
    return None


def join(folders: list[Path], plan: Plan, out_dir: Path) -> Manifest:
    """Make the dataset `out_dir` from the parts in `folders`, in order. It is written beside its place and then moved.

    Raises:
        Unusable: nothing is left to train or to validate on.
        UserError: a part is damaged, most documents have no text, or there are too many sets.
    """
    started, partial = time.monotonic(), partial_dir(out_dir)
    directory = partial / "dataset"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    tokenizer = load_tokenizer(folders[0] / TOKENIZER)
    if tokenizer.sha256 != plan.tokenizer.sha256:
        raise damaged(folders[0], f"{TOKENIZER} is another tokenizer")
    save_tokenizer(tokenizer, directory / TOKENIZER)
    parts = [part for folder in folders for part in read_parts(folder)]
    joint = _Joint(directory, plan)
    joint.write(parts)
    manifest = joint.manifest()
    write_json(directory / MANIFEST, manifest.model_dump(mode="json"))
    os.replace(directory, out_dir.resolve())
    sync_directory(out_dir.resolve().parent)
    remove(partial)
    _summarize(out_dir, manifest, joint.first, time.monotonic() - started)
    return manifest


class _Joint:
    """A dataset that is being joined."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.plan = plan
        shard_tokens = plan.prepared["shard_tokens"]
        self.writers = [ShardWriter(directory, split, plan.tokenizer.n_vocab, shard_tokens) for split in _SPLITS]
        self.inputs: dict[str, int] = {}
        self.set_names: dict[str, int] = {}
        """Names and their numbers, in the order of their first document."""
        self.counts = np.zeros((len(_SPLITS), MAX_SETS, 3), np.int64)
        """Tokens, documents and bytes of text, by split and set."""
        self.skipped: Counter[str] = Counter()
        self.val_tokens: int | None = plan.prepared.get("val_tokens")
        """Documents that begin before this token are for validation; None: those whose place is below `below`."""
        self.below: float = plan.prepared.get("val_fraction", 0.0)
        self.first: dict[str, str] = {}
        """Where each reason to skip a document was met first."""

    def write(self, parts: list[Part]) -> None:
        """Write the shards."""
        total = sum(part.documents for part in parts)
        exact = self.plan.prepared["dedup"] == "exact"
        if self.plan.piece:  # even with few pieces, each split gets at least one
            places = np.concatenate([document_places(part.entries()) for part in parts])
            self.below = min(max(self.below, np.nextafter(places.min(), 1)), places.max())
        duplicates = find_duplicates(parts) if exact else np.zeros(total, bool)
        with Track("joining, documents", total) as track:
            for part in parts:
                self.add(part, duplicates[track.done : track.done + part.documents])
                track.advance(part.documents)

    def add(self, part: Part, duplicate: np.ndarray) -> None:
        """Write the documents of a part that are not duplicates, and count all."""
        entries = part.entries()
        if duplicate.any():
            found = entries[duplicate][0]
            self.first.setdefault(_DUPLICATE, f"{part.inputs[found['input']]}:{found['number']}")
        self.first = part.first | self.first
        self.skipped.update({**part.skipped, _DUPLICATE: int(duplicate.sum())})
        lengths = entries["tokens"].astype(np.int64)
        if self.val_tokens is None:
            is_val = document_places(entries) < self.below
        else:
            written = self.counts[..., 0].sum() + np.cumsum(np.where(duplicate, 0, lengths))
            is_val = written - lengths < self.val_tokens
        sets = _renumber(entries["set"], ~duplicate, part.set_names, self.set_names)
        if len(self.set_names) > MAX_SETS:
            name = list(self.set_names)[MAX_SETS]
            raise UserError(f"{name!r} is one more than the {MAX_SETS:,} sets a dataset can hold")
        records = np.zeros(entries.size, RECORD)
        records["number"], records["set"] = entries["number"], sets
        records["input"] = _renumber(entries["input"], ~duplicate, part.inputs, self.inputs)
        ids = part.ids()
        for i, writer in enumerate(self.writers):
            mine = (is_val == i) & ~duplicate
            for unit, amounts in enumerate((lengths[mine], None, entries["utf8_bytes"][mine])):
                self.counts[i, :, unit] += np.bincount(sets[mine], amounts, MAX_SETS).astype(np.int64)
            writer.append(ids[np.repeat(mine, lengths)], lengths[mine], records[mine])

    def manifest(self) -> Manifest:
        """Finish the shards and return what was written.

        Raises:
            Unusable: one of the splits has no documents.
            UserError: most documents have no text.
        """
        self._check_not_empty()
        splits, counted = {}, self.counts[:, : len(self.set_names)]
        for name, counts, writer in zip(_SPLITS, counted.tolist(), self.writers, strict=True):
            used = [(set_name, counts[i]) for set_name, i in sorted(self.set_names.items()) if counts[i][1]]
            sets = {set_name: Counts(tokens=n[0], documents=n[1], utf8_bytes=n[2]) for set_name, n in used}
            splits[name] = Split(sets=sets, shards=writer.finish())
        return Manifest(
            tokenizer=self.plan.tokenizer,
            inputs=list(self.inputs),
            set_names=list(self.set_names),
            splits=splits,
            skipped=dict(sorted((+self.skipped).items())),
            prepared=self.plan.prepared,
        )

    def _check_not_empty(self) -> None:
        documents = self.counts[:, :, 1].sum(axis=1).tolist()
        missing, n_items = self.skipped[NO_TEXT], sum(documents) + self.skipped.total()
        check_text(self.plan.prepared["data"], missing, n_items, self.first.get(NO_TEXT))
        if not any(documents):
            found = (+self.skipped).most_common()
            why = ", ".join(f"{n:,} x {reason}, first {self.first[reason]}" for reason, n in found)
            remedy = REMEDIES.get(found[0][0], "check data.path") if found else "check data.path"
            raise Unusable(f"the corpus is empty ({why or 'it has no documents'}): {remedy}")
        if not all(documents) and self.val_tokens:
            what = f"all {sum(documents)} documents begin within val_tokens={self.val_tokens}: none is left to train on"
            raise Unusable(f"{what}: give a smaller val_tokens")
        if not all(documents):
            fraction = self.plan.prepared["val_fraction"]
            empty = _SPLITS[documents.index(0)]
            change = "larger" if empty == "val" else "smaller"
            remedy = f"give a {change} val_fraction, or add documents with other texts"
            message = f"none of {sum(documents)} documents went to '{empty}' with val_fraction={fraction}: {remedy}"
            wanted = int(self.counts[:, :, 2].sum() * min(fraction, 1 - fraction))  # bytes of the smaller split
            if self.plan.piece or not wanted:
                raise Unusable(message)
            raise EmptySplit(message, min(max(wanted // 4, _SHORTEST_PIECE), _LONGEST_PIECE))


def check_text(data: dict[str, Any], missing: int, n_items: int, first: str | None, of: str = "") -> None:
    """Check that at most half of the documents of a source have no text; `first`: where the first of these is.

    Raises:
        UserError: more have none. Not Unusable, because that deletes the parts, which may have taken hours.
    """
    if 2 * missing > n_items:
        what = f"data.text_field={data['text_field']} is missing in {missing:,} of {of}{n_items:,} documents"
        raise UserError(f"{what} (first: {first}): give the key that holds their text")


def document_places(entries: np.ndarray) -> np.ndarray:
    """Return a number between 0 and 1 for each document, float64 (n,), which depends on its text alone."""
    return _digests(entries)[:, 0] / 2.0**64


def find_duplicates(parts: list[Part]) -> np.ndarray:
    """Return for each document of all parts whether an earlier one has the same text: bool (documents,).

    Digests are compared in groups, each of which fits into memory.
    """
    total = sum(part.documents for part in parts)
    found = np.zeros(total, bool)
    n_groups = -(-total // _DOCUMENTS_AT_ONCE)
    for group in range(n_groups):
        digests, numbers, begin = [], [], 0
        for part in parts:
            mine = _digests(part.entries())
            chosen = np.flatnonzero(mine[:, 1] % n_groups == group)
            digests.append(mine[chosen])
            numbers.append(begin + chosen)
            begin += len(mine)
        keys = np.concatenate(digests)
        order = np.lexsort(keys.T)  # a stable sort: of equal digests, the first document remains first
        keys = keys[order]
        equal = (keys[1:] == keys[:-1]).all(axis=1)
        found[np.concatenate(numbers)[order[1:][equal]]] = True
    return found


def _digests(entries: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(entries["digest"]).view("<u8").reshape(-1, 2)


def _renumber(numbers: np.ndarray, kept: np.ndarray, names: list[str], table: dict[str, int]) -> np.ndarray:
    """Turn a part's numbers into those of the dataset; names of documents that are kept are added to its table."""
    used, first = np.unique(numbers[kept], return_index=True)
    new = np.zeros(len(names), np.int64)
    for number in used[np.argsort(first)].tolist():
        new[number] = table.setdefault(names[number], len(table))
    return new[numbers]


def _summarize(out_dir: Path, manifest: Manifest, first: dict[str, str], seconds: float) -> None:
    show_table(sets_table(manifest))
    for reason, count in manifest.skipped.items():
        where = f" (first: {first[reason]})" if reason in first else ""
        say(f"skipped {count:,} x {reason}{where}")
    written = sum(split.total.documents for split in manifest.splits.values())
    skipped = sum(manifest.skipped.values())
    say(f"{written + skipped:,} documents in the input: {written:,} written, {skipped:,} skipped")
    say(f"{out_dir} is ready; joining took {seconds:.1f} s")
