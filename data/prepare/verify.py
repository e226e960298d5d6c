"""Verifying a dataset: everything its manifest says is recomputed from the files."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from common.console import Track
from common.settings import UserError
from data.documents import wrong_record
from data.shards import (
    HEADER,
    MANIFEST,
    RECORD,
    TOKENIZER,
    Counts,
    Manifest,
    Shard,
    SplitName,
    check_index,
    check_sum,
    check_tokens,
    parse_manifest,
)
from data.tokenizer import load_tokenizer

_IDS_AT_ONCE = 2**18  # so many fit into a core's cache
_UNITS = ("tokens", "documents", "utf8_bytes")


def verify(dataset_dir: Path, threads: int | None = None) -> list[str]:
    """Return a line for each problem of a dataset, with the file's name; none if the dataset is whole.

    It checks the sums of all files, the documents, tokens and bytes of text of every set and split, that every id is in
    the tokenizer's vocabulary, and that the indexes say where documents end and where they are from. `threads` read
    shards at the same time; None: one for every CPU.
    """
    try:
        manifest = parse_manifest(dataset_dir)
    except UserError as error:
        return [str(error)]
    problems: list[str] = []
    lengths = _byte_lengths(dataset_dir / TOKENIZER, manifest, problems)
    units = _UNITS[:2] if problems else _UNITS
    pool = ThreadPoolExecutor(threads or os.cpu_count())
    try:
        with Track("verifying, bytes", n_bytes(manifest)) as track:
            for name, split in manifest.splits.items():
                counts = pool.map(lambda shard: ShardCount(dataset_dir, manifest, shard, lengths), split.shards)
                problems += _check_split(dataset_dir, manifest, name, _show(counts, track), units)
    finally:
        pool.shutdown(cancel_futures=True)
    return problems


class ShardCount:
    """The contents and the problems of the two files of a shard, at most one problem of a kind."""

    def __init__(self, dataset_dir: Path, manifest: Manifest, shard: Shard, lengths: np.ndarray) -> None:
        """Read them; `lengths` are the bytes of text of each id, the last also of all higher ids."""
        self.manifest, self.shard, self.lengths = manifest, shard, lengths
        self.path, self.index_path = dataset_dir / shard.file, dataset_dir / shard.index_file
        self.problems: dict[str, str] = {}
        self.sets = np.zeros((len(manifest.set_names), len(_UNITS)), np.int64)
        """The amount of each unit in each set."""
        self.first: tuple[int, int] | None = None
        self.last = (0, 0)
        """Input and number of the first and the last document."""
        self.tokens = self.documents = 0
        """Found so far."""
        self._begin = self._bytes = 0  # first token, and bytes so far, of a document that goes on in the next block
        self._try("tokens", check_tokens, dataset_dir, manifest, shard)
        self._try("index", check_index, dataset_dir, manifest, shard)
        if not self.problems:
            try:
                self._read()
            except OSError as error:
                self._wrong("tokens", self.path, f"it or its index cannot be read ({error.strerror})")
        self.countable = not self.problems.keys() & {"tokens", "index", "records"}
        """Whether `sets` covers the whole shard."""

    def _read(self) -> None:
        shard, sha256 = self.shard, hashlib.sha256()
        with open(self.path, "rb") as file, open(self.index_path, "rb") as index:
            index_sha256 = hashlib.sha256(index.read(HEADER.size))
            while content := file.read(_IDS_AT_ONCE * self.manifest.dtype.itemsize):
                sha256.update(content)
                ends, utf8_bytes = self._documents(np.frombuffer(content, self.manifest.dtype))
                content = index.read(ends.size * RECORD.itemsize)
                index_sha256.update(content)
                self._compare(np.frombuffer(content, RECORD), ends, utf8_bytes)
                self.documents += ends.size
            while content := index.read(2**20):
                index_sha256.update(content)
        if self.documents != shard.documents:
            self._wrong("index", self.path, f"it holds {self.documents} documents, the manifest says {shard.documents}")
        if self._begin != self.tokens:
            self._wrong("end", self.path, "its last document is not ended by <|endoftext|>")
        self._try("sum", check_sum, self.path, sha256.hexdigest(), shard.sha256)
        self._try("index sum", check_sum, self.index_path, index_sha256.hexdigest(), shard.index_sha256)

    def _documents(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ends in the shard and bytes of text of the documents that end in the next block; int64 (n,)."""
        eot_id = self.manifest.tokenizer.eot_id
        if (highest := int(ids.max())) > eot_id:
            self._wrong("ids", self.path, f"it holds the id {highest}, its tokenizer's last is {eot_id}")
        ends = np.flatnonzero(ids == eot_id) + 1
        lengths = self.lengths.take(ids, mode="clip")
        starts = np.concatenate([[0], ends])
        utf8_bytes = np.add.reduceat(lengths, starts[starts < ids.size], dtype=np.int64)
        utf8_bytes[0] += self._bytes
        self._bytes = 0 if starts[-1] == ids.size else int(utf8_bytes[-1])
        ends += self.tokens
        self.tokens += ids.size
        return ends, utf8_bytes[: ends.size]

    def _compare(self, records: np.ndarray, ends: np.ndarray, utf8_bytes: np.ndarray) -> None:
        """Check the records of the documents that end at `ends`, and add them to the counts of their sets."""
        if not ends.size:
            return
        begins = np.concatenate([[self._begin], ends[:-1]])
        self._begin = int(ends[-1])
        n = min(records.size, ends.size)
        records, stated = records[:n], records["end"][:n]
        if (different := stated != ends[:n].astype(stated.dtype)).any():
            i = int(different.argmax())
            text = f"document {self.documents + i + 1} is said to end at token {stated[i]}, it ends at {ends[i]}"
            self._wrong("records", self.index_path, text)
        elif n and (wrong := wrong_record(records, int(begins[0]), self.manifest, self.shard)):
            self._wrong("records", self.index_path, wrong)
        elif n:
            self._check_order(records)
            units = (ends - begins, np.ones_like(ends), utf8_bytes)
            for unit, numbers in enumerate(units):  # as float64, exact below 2**53
                sums = np.bincount(records["set"], numbers[:n], len(self.sets))
                self.sets[:, unit] += sums.astype(np.int64)

    def _check_order(self, records: np.ndarray) -> None:
        """Check that documents are in the order of their inputs, and of their numbers in these."""
        inputs, numbers = records["input"].astype(np.int64), records["number"]
        before_inputs = np.concatenate([[self.last[0]], inputs[:-1]])
        before = np.concatenate([np.array([self.last[1]], numbers.dtype), numbers[:-1]])
        back = (inputs < before_inputs) | ((inputs == before_inputs) & (numbers <= before))
        if back.any():
            i = int(back.argmax())
            text = f"document {self.documents + i + 1} is number {numbers[i]} of input {inputs[i]}, after number "
            self._wrong("order", self.index_path, f"{text}{before[i]} of input {before_inputs[i]}")
        self.first = self.first or (int(inputs[0]), int(numbers[0]))
        self.last = int(inputs[-1]), int(numbers[-1])

    def _wrong(self, kind: str, path: Path, text: str) -> None:
        self.problems.setdefault(kind, f"{path} is damaged: {text}: prepare the dataset again")

    def _try(self, kind: str, check: Callable[..., None], *arguments: Any) -> None:
        try:
            check(*arguments)
        except (UserError, OSError) as error:
            self.problems[kind] = str(error)


def n_bytes(manifest: Manifest) -> int:
    """Return the bytes of a dataset's shards and indexes."""
    return sum(_shard_bytes(manifest, shard) for split in manifest.splits.values() for shard in split.shards)


def _shard_bytes(manifest: Manifest, shard: Shard) -> int:
    return shard.tokens * manifest.dtype.itemsize + shard.index_size


def _show(counts: Iterable[ShardCount], track: Track) -> Iterable[ShardCount]:
    started = time.monotonic()
    for count in counts:
        track.advance(_shard_bytes(count.manifest, count.shard))
        track.advance(0, f"{track.done / 1e6 / (time.monotonic() - started):,.0f} MB/s")
        yield count


def _byte_lengths(path: Path, manifest: Manifest, problems: list[str]) -> np.ndarray:
    """Return the bytes of text of each id (n_vocab,); 0 (1,) and a problem if the tokenizer is not the manifest's."""
    try:
        tokenizer = load_tokenizer(path)
    except UserError as error:
        problems.append(str(error))
        return np.zeros(1, np.uint8)
    if (tokenizer.sha256, tokenizer.n_vocab) != (manifest.tokenizer.sha256, manifest.tokenizer.n_vocab):
        problems.append(f"{path} is not the tokenizer of {MANIFEST}: prepare the dataset again")
        return np.zeros(1, np.uint8)
    return tokenizer.byte_lengths.astype(np.min_scalar_type(tokenizer.byte_lengths.max()))


def _check_split(
    dataset_dir: Path, manifest: Manifest, name: SplitName, counts: Iterable[ShardCount], units: tuple[str, ...]
) -> list[str]:
    """Return the problems of a split's shards, and of the manifest's counts of them."""
    problems: list[str] = []
    found = np.zeros((len(manifest.set_names), len(_UNITS)), np.int64)
    last, countable = (0, 0), True
    for count in counts:
        problems += count.problems.values()
        countable &= count.countable
        found += count.sets
        if count.first and count.first <= last:
            after = f"after number {last[1]} of input {last[0]} in the shard before it"
            text = f"it begins with number {count.first[1]} of input {count.first[0]}, {after}"
            problems.append(f"{count.index_path} is damaged: {text}: prepare the dataset again")
        last = count.last if count.first else last
    if not countable:
        return problems
    for set_name, numbers in zip(manifest.set_names, found.tolist(), strict=True):
        stated = manifest.splits[name].sets.get(set_name, Counts(tokens=0, documents=0, utf8_bytes=0))
        for unit, number in zip(units, numbers, strict=False):
            if (said := getattr(stated, unit)) != number:
                text = f"set {set_name!r} of {name} has {number} {unit} in the shards, {said} in the manifest"
                problems.append(f"{dataset_dir / MANIFEST} is damaged: {text}: prepare the dataset again")
    return problems
