"""Joining parts to a dataset: duplicates are dropped, documents fall into splits, and shards are filled in order."""

import contextlib
import hashlib
import itertools
import math
import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import numpy as np

from common.console import Track, say, show_table
from common.files import open_file, sync_directory
from common.settings import UserError
from data.prepare.inspect import sets_table
from data.prepare.parts import Plan, StoredPart, changes_between, damaged, read_parts, remove
from data.prepare.writer import ShardWriter
from data.shards import (
    MANIFEST,
    MAX_SETS,
    RECORD,
    TOKENIZER,
    Counts,
    Manifest,
    Split,
    SplitName,
    check_sum,
    read_manifest,
    token_dtype,
    write_manifest,
)
from data.tokenizer import load_tokenizer, save_tokenizer

_SPLITS: tuple[SplitName, ...] = get_args(SplitName)
_DROPPED = -1  # in place of the number of a split
_DOCUMENTS_AT_ONCE = 2**23  # whose digests are sorted together, which takes some 400 MB
_ENOUGH_PLACES = 1000  # documents from which a val_fraction is suggested where a split would be empty
_WANTED_IN_A_SPLIT = 10  # documents that this split gets with it


class EmptySplit(UserError):
    """Nothing is left to train or to validate on."""


def partial_dir(out_dir: Path) -> Path:
    """Return where a dataset is written before it is whole."""
    out_dir = out_dir.resolve()
    return out_dir.with_name(out_dir.name + ".partial")


def existing(out_dir: Path, prepared: dict[str, Any]) -> Manifest | None:
    """Return the manifest of the dataset `out_dir` if it exists and was made with these settings, None if it is absent.

    Raises:
        UserError: the folder holds something else.
    """
    if (out_dir / MANIFEST).exists():
        manifest = read_manifest(out_dir)
        if changes := changes_between(manifest.prepared, prepared):
            raise UserError(f"out_dir={out_dir} was made with {changes}: choose another out_dir or delete it")
        say(f"{out_dir} is already prepared with these settings; delete it to prepare it again")
        remove(partial_dir(out_dir))  # left by a run that was stopped at its very end
        return manifest
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise UserError(f"out_dir={out_dir} exists and is not a dataset: choose another folder")
    return None


def join(folders: list[Path], plan: Plan, out_dir: Path) -> Manifest:
    """Make the dataset `out_dir` from the parts in `folders`, in order. It is written beside its place and then moved.

    Raises:
        EmptySplit: nothing is left to train or to validate on.
        UserError: a part is damaged, or there are too many sets.
    """
    started, partial = time.monotonic(), partial_dir(out_dir)
    directory = partial / "dataset"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    tokenizer = load_tokenizer(folders[0] / TOKENIZER)
    if tokenizer.sha256 != plan.tokenizer.sha256:
        raise damaged(folders[0], f"{TOKENIZER} is another tokenizer")
    save_tokenizer(tokenizer, directory / TOKENIZER)
    parts = [part for folder in folders for part in read_parts(folder, token_dtype(tokenizer.n_vocab))]
    joint = _Joint(directory, plan)
    joint.write(parts)
    joint.check_not_empty(parts)
    manifest = joint.manifest()
    write_manifest(directory, manifest)
    os.replace(directory, out_dir.resolve())
    sync_directory(out_dir.resolve().parent)
    remove(partial)
    _summarize(out_dir, manifest, joint.first, time.monotonic() - started)
    return manifest


class _Joint:
    """A dataset that is being joined."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.directory, self.plan, self.n_vocab = directory, plan, plan.tokenizer.n_vocab
        self.inputs: dict[str, int] = {}
        self.set_names: dict[str, int] = {}
        """Names and their numbers, in the order of their first document."""
        self.counts = np.zeros((len(_SPLITS), MAX_SETS, 3), np.int64)
        """Tokens, documents and bytes of text, by split and set."""
        self.skipped: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        """Where each reason to skip a document was met first."""

    def write(self, parts: list[StoredPart]) -> None:
        """Write the shards."""
        total = sum(part.info.documents for part in parts)
        exact = self.plan.prepared["dedup"] == "exact"
        duplicates = find_duplicates(parts) if exact else np.zeros(total, bool)
        done, shard_tokens = 0, self.plan.prepared["shard_tokens"]
        with contextlib.ExitStack() as stack, Track("joining, documents", total) as track:
            writers = [ShardWriter(self.directory, split, self.n_vocab, shard_tokens) for split in _SPLITS]
            for writer in writers:
                stack.enter_context(writer)
            for part in parts:
                entries = part.entries()
                self._add(part, entries, duplicates[done : done + entries.size], writers)
                track.advance(entries.size)
                done += entries.size
            self.shards = [writer.finish() for writer in writers]

    def _add(self, part: StoredPart, entries: np.ndarray, duplicate: np.ndarray, writers: list[ShardWriter]) -> None:
        for reason, where in part.info.first.items():
            self.first.setdefault(reason, where)
        self.skipped.update(part.info.skipped)
        if duplicate.any():
            self.skipped["duplicate document"] += int(duplicate.sum())
            found = entries[duplicate][0]
            self.first.setdefault("duplicate document", f"{part.info.inputs[found['input']]}:{found['number']}")
        is_val = document_places(entries) < self.plan.prepared["val_fraction"]
        split = np.where(duplicate, _DROPPED, is_val.astype(np.int64))
        records = np.zeros(entries.size, RECORD)
        records["number"] = entries["number"]
        records["input"] = _renumber(entries["input"], ~duplicate, part.info.inputs, self.inputs)
        sets = _renumber(entries["set"], ~duplicate, part.info.set_names, self.set_names)
        if len(self.set_names) > MAX_SETS:
            name = list(self.set_names)[MAX_SETS]
            raise UserError(f"{name!r} is one more than the {MAX_SETS:,} sets a dataset can hold")
        records["set"] = sets
        for i in range(len(_SPLITS)):
            mine = split == i
            for unit, amounts in enumerate((entries["tokens"][mine], None, entries["utf8_bytes"][mine])):
                self.counts[i, :, unit] += np.bincount(sets[mine], amounts, MAX_SETS).astype(np.int64)
        _copy(part, entries["tokens"].astype(np.int64), records, split, writers)

    def check_not_empty(self, parts: list[StoredPart]) -> None:
        """Raise EmptySplit if one of the splits has no documents."""
        documents = self.counts[:, :, 1].sum(axis=1).tolist()
        if all(documents):
            return
        if not any(documents):
            why = ", ".join(f"{n} x {reason}" for reason, n in self.skipped.items()) or "it has no documents"
            raise EmptySplit(f"the corpus is empty ({why}): check data.path")
        empty = _SPLITS[documents.index(0)]
        raise EmptySplit(
            f"none of {sum(documents)} documents went to '{empty}' with "
            f"val_fraction={self.plan.prepared['val_fraction']}: {_remedy(parts, empty)}"
        )

    def manifest(self) -> Manifest:
        """Return what was written."""
        splits = {}
        for name, counts, shards in zip(_SPLITS, self.counts.tolist(), self.shards, strict=True):
            used = [(set_name, counts[i]) for set_name, i in sorted(self.set_names.items()) if counts[i][1]]
            sets = {set_name: Counts(tokens=n[0], documents=n[1], utf8_bytes=n[2]) for set_name, n in used}
            splits[name] = Split(sets=sets, shards=shards)
        return Manifest(
            tokenizer=self.plan.tokenizer,
            inputs=list(self.inputs),
            set_names=list(self.set_names),
            splits=splits,
            skipped=dict(sorted(self.skipped.items())),
            prepared=self.plan.prepared,
        )


def document_places(entries: np.ndarray) -> np.ndarray:
    """Return a number between 0 and 1 for each document, float64 (n,), which depends on its text alone."""
    return _digests(entries)[:, 0] / 2.0**64


def find_duplicates(parts: list[StoredPart]) -> np.ndarray:
    """Return for each document of all parts whether an earlier one has the same text: bool (documents,).

    Digests are compared in groups, each of which fits into memory.
    """
    total = sum(part.info.documents for part in parts)
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


def _copy(
    part: StoredPart, lengths: np.ndarray, records: np.ndarray, split: np.ndarray, writers: list[ShardWriter]
) -> None:
    """Copy the token ids of a part, by runs of documents that go to the same place, and check their sum."""
    path, sha256, dtype = part.path("bin"), hashlib.sha256(), writers[0].dtype
    borders = [0, *(np.flatnonzero(np.diff(split)) + 1).tolist(), split.size] if split.size else []
    with open_file(path) as file:
        for first, last in itertools.pairwise(borders):
            content = file.read(int(lengths[first:last].sum()) * dtype.itemsize)
            sha256.update(content)
            if split[first] != _DROPPED:
                writer = writers[split[first]]
                writer.append(np.frombuffer(content, dtype), lengths[first:last], records[first:last])
    try:
        check_sum(path, sha256.hexdigest(), part.info.sha256)
    except UserError as error:
        raise damaged(part.folder, error) from None


def _remedy(parts: list[StoredPart], empty: SplitName) -> str:
    """Say what to do about an empty split: a val_fraction that gives it some documents, if there is one."""
    places = np.empty(0)
    for part in parts:
        places = np.union1d(places, document_places(part.entries()))
        if places.size >= _ENOUGH_PLACES:
            break
    if places.size < 2:
        return "the text decides, and there is only one: add documents with other texts"
    some = min(_WANTED_IN_A_SPLIT, places.size // 2)
    n_val = some if empty == "val" else places.size - some
    return f"try val_fraction={_shortest_between(*places[n_val - 1 : n_val + 1].tolist())} or add documents"


def _shortest_between(low: float, high: float) -> float:
    """Return a number of few decimal places that is above `low` and at most `high`."""
    shortened = (math.floor(high * 10**digits) / 10**digits for digits in range(1, 17))
    return next((x for x in shortened if low < x <= high), high)


def _summarize(out_dir: Path, manifest: Manifest, first: dict[str, str], seconds: float) -> None:
    show_table(sets_table(manifest))
    for reason, count in manifest.skipped.items():
        where = f" (first: {first[reason]})" if reason in first else ""
        say(f"skipped {count:,} x {reason}{where}")
    written = sum(split.total.documents for split in manifest.splits.values())
    skipped = sum(manifest.skipped.values())
    say(f"{written + skipped:,} documents in the input: {written:,} written, {skipped:,} skipped")
    say(f"{out_dir} is ready; joining took {seconds:.1f} s")
