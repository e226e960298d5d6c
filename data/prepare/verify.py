"""Verifying a dataset: everything its manifest says is recomputed from the files."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.console import Track
from common.files import open_file
from common.settings import UserError
from data.documents import open_index, wrong_record
from data.shards import (
    MANIFEST,
    TOKENIZER,
    Counts,
    Manifest,
    Shard,
    SplitName,
    check_file,
    check_sum,
    damaged,
    parse_manifest,
)
from data.tokenizer import load_tokenizer

_IDS_AT_ONCE = 2**18  # so many fit into a core's cache
_UNITS = ("tokens", "documents", "utf8_bytes")


class Contents(NamedTuple):
    """What a shard holds."""

    sets: np.ndarray
    """The amount of each unit in each set, (sets, units)."""
    first: tuple[int, int]
    last: tuple[int, int]
    """Input and number of the first and the last document."""


def verify(dataset_dir: Path, threads: int | None = None) -> list[str]:
    """Return a line for the first problem of each file of a dataset; none if the dataset is whole.

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
    check = partial(_check_shard, dataset_dir, manifest, lengths)
    pool = ThreadPoolExecutor(threads or os.cpu_count())
    try:
        with Track("verifying, bytes", n_bytes(manifest)) as track:
            for name, split in manifest.splits.items():
                found = []
                for shard, contents in zip(split.shards, pool.map(check, split.shards), strict=True):
                    found.append(contents)
                    track.advance(_shard_bytes(manifest, shard))
                problems += _check_split(dataset_dir, manifest, name, found, units)
    finally:
        pool.shutdown(cancel_futures=True)
    return problems


def _check_shard(dataset_dir: Path, manifest: Manifest, lengths: np.ndarray, shard: Shard) -> Contents | list[str]:
    """Return the contents of a shard, or its problems; `lengths` are the bytes of text of each id."""
    problems = []
    for file, sha256 in ((shard.file, shard.sha256), (shard.index_file, shard.index_sha256)):
        try:
            check_file(dataset_dir / file, manifest, shard)
            check_sum(dataset_dir / file, sha256)
        except UserError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(str(damaged(dataset_dir / file, f"it cannot be read ({error.strerror})")))
    try:
        return problems or _read_shard(dataset_dir, manifest, shard, lengths)
    except UserError as error:
        return [str(error)]


def _read_shard(dataset_dir: Path, manifest: Manifest, shard: Shard, lengths: np.ndarray) -> Contents:
    """Count what a shard holds. Raises UserError at the first document that is not as its record says."""
    path, index_path = dataset_dir / shard.file, dataset_dir / shard.index_file
    records = open_index(dataset_dir, shard)
    if wrong := wrong_record(records, 0, manifest, shard) or _wrong_order(records):
        raise damaged(index_path, wrong)
    ends, eot_id = records["end"].astype(np.int64), manifest.tokenizer.eot_id
    if ends[-1] != shard.tokens:
        raise damaged(index_path, f"its last document ends at token {ends[-1]} of {shard.tokens}")
    sets = np.zeros((len(manifest.set_names), len(_UNITS)), np.int64)
    first = begin = 0
    with open_file(path) as file:
        while first < ends.size:
            last = max(first + 1, int(np.searchsorted(ends, begin + _IDS_AT_ONCE)))
            mine = ends[first:last] - begin
            ids = np.frombuffer(file.read(int(mine[-1]) * manifest.dtype.itemsize), manifest.dtype)
            if (highest := int(ids.max())) > eot_id:
                raise damaged(path, f"it holds the id {highest}, its tokenizer's last is {eot_id}")
            if not np.array_equal(np.flatnonzero(ids == eot_id) + 1, mine):
                raise damaged(path, f"documents {first + 1} to {last} do not end where its index says")
            starts = np.concatenate([[0], mine[:-1]])
            utf8_bytes = np.add.reduceat(lengths.take(ids, mode="clip"), starts, dtype=np.int64)
            for unit, amounts in enumerate((mine - starts, None, utf8_bytes)):  # as float64, exact below 2**53
                sets[:, unit] += np.bincount(records["set"][first:last], amounts, len(sets)).astype(np.int64)
            first, begin = last, begin + ids.size
    keys = records[["input", "number"]]
    return Contents(sets, keys[0].item(), keys[-1].item())


def _wrong_order(records: np.ndarray) -> str | None:
    """Say which document does not follow its predecessor in the order of inputs, and of their numbers in these."""
    inputs, numbers = records["input"], records["number"]
    back = (inputs[1:] < inputs[:-1]) | ((inputs[1:] == inputs[:-1]) & (numbers[1:] <= numbers[:-1]))
    if not back.any():
        return None
    i = int(back.argmax())
    after = f"after number {numbers[i]} of input {inputs[i]}"
    return f"document {i + 2} is number {numbers[i + 1]} of input {inputs[i + 1]}, {after}"


def n_bytes(manifest: Manifest) -> int:
    """Return the bytes of a dataset's shards and indexes."""
    return sum(_shard_bytes(manifest, shard) for split in manifest.splits.values() for shard in split.shards)


def _shard_bytes(manifest: Manifest, shard: Shard) -> int:
    return shard.tokens * manifest.dtype.itemsize + shard.index_size


def _byte_lengths(path: Path, manifest: Manifest, problems: list[str]) -> np.ndarray:
    """Return the bytes of text of each id (n_vocab,); 0 (1,) and a problem if the tokenizer is not the manifest's."""
    try:
        tokenizer = load_tokenizer(path)
        if (tokenizer.sha256, tokenizer.n_vocab) == (manifest.tokenizer.sha256, manifest.tokenizer.n_vocab):
            return tokenizer.byte_lengths.astype(np.min_scalar_type(tokenizer.byte_lengths.max()))
        problems.append(f"{path} is not the tokenizer of {MANIFEST}: prepare the dataset again")
    except UserError as error:
        problems.append(str(error))
    return np.zeros(1, np.uint8)


def _check_split(
    dataset_dir: Path,
    manifest: Manifest,
    name: SplitName,
    found: list[Contents | list[str]],
    units: tuple[str, ...],
) -> list[str]:
    """Return the problems of a split's shards, and of the manifest's counts of them."""
    problems: list[str] = []
    sums = np.zeros((len(manifest.set_names), len(_UNITS)), np.int64)
    last = (0, 0)
    for shard, contents in zip(manifest.splits[name].shards, found, strict=True):
        if isinstance(contents, list):
            problems += contents
            continue
        sums += contents.sets
        if contents.first <= last:
            after = f"after number {last[1]} of input {last[0]} in the shard before it"
            text = f"it begins with number {contents.first[1]} of input {contents.first[0]}, {after}"
            problems.append(str(damaged(dataset_dir / shard.index_file, text)))
        last = contents.last
    if problems:
        return problems
    for set_name, numbers in zip(manifest.set_names, sums.tolist(), strict=True):
        stated = manifest.splits[name].sets.get(set_name, Counts(tokens=0, documents=0, utf8_bytes=0))
        for unit, number in zip(units, numbers, strict=False):
            if (said := getattr(stated, unit)) != number:
                text = f"set {set_name!r} of {name} has {number} {unit} in the shards, {said} in the manifest"
                problems.append(str(damaged(dataset_dir / MANIFEST, text)))
    return problems
