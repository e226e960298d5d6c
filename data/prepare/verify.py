"""Verifies a dataset: recomputes everything in its manifest from the files."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import PositiveInt

from common.console import Track, count, print_error, say
from common.files import open_file
from common.settings import UserError
from data.documents import read_index
from data.shards import (
    MANIFEST,
    TOKENIZER,
    Counts,
    Manifest,
    Shard,
    check_file,
    damaged,
    parse_manifest,
    total_of,
)
from data.tokenizer import load_tokenizer

_IDS_AT_ONCE = 2**18  # so many fit into a core's cache


def verify_or_exit(dataset_dir: Path, threads: PositiveInt | None = None) -> None:
    """Print that a dataset is whole, or its problems.

    Raises:
        SystemExit: it has problems; the status is 1.
    """
    for problem in (problems := verify(dataset_dir, threads)):
        print_error(problem)
    if problems:
        raise SystemExit(1)
    manifest = parse_manifest(dataset_dir)
    total = total_of(split.total for split in manifest.splits.values())
    n_sets, n_inputs = count(len(manifest.set_names), "set"), count(len(manifest.inputs), "input")
    say(
        f"{dataset_dir} is whole: {total.documents:,} documents, {total.tokens:,} tokens, {n_sets}, {n_inputs}"
    )


def verify(dataset_dir: Path, threads: int | None = None) -> list[str]:
    """Return a line for the first problem of each shard of a dataset, or of its tokenizer; none if it is whole.

    It checks the sums of all files, the documents, tokens and bytes of text of every set and split, that every id is in
    the tokenizer's vocabulary, and that the indexes say where documents end and where they are from. `threads` read
    shards at the same time; None: one for every CPU.
    """
    try:
        manifest = parse_manifest(dataset_dir)
        tokenizer = load_tokenizer(dataset_dir / TOKENIZER)
    except UserError as error:
        return [str(error)]
    if tokenizer.id != manifest.tokenizer:
        return [
            f"{dataset_dir / TOKENIZER} is not the tokenizer of {MANIFEST}: prepare the dataset again"
        ]
    problems: list[str] = []
    lengths = tokenizer.byte_lengths.astype(np.min_scalar_type(tokenizer.byte_lengths.max()))
    check = partial(_check_shard, dataset_dir, manifest, lengths)
    pool = ThreadPoolExecutor(threads or os.cpu_count())
    try:
        with Track(
            "verifying, shards", sum(len(split.shards) for split in manifest.splits.values())
        ) as track:
            for name, split in manifest.splits.items():
                found: list[str] = []
                counts = np.zeros((len(manifest.set_names), len(Counts.model_fields)), np.int64)
                for wrong, of_shard in pool.map(check, split.shards):
                    found += wrong
                    counts += of_shard
                    track.advance(1)
                if not found:
                    wrong_sets = _wrong(name, split.sets, manifest.set_names, counts)
                    found = [str(damaged(dataset_dir / MANIFEST, wrong)) for wrong in wrong_sets]
                problems += found
    finally:
        pool.shutdown(cancel_futures=True)
    return problems


def _check_shard(
    dataset_dir: Path, manifest: Manifest, lengths: np.ndarray, shard: Shard
) -> tuple[list[str], np.ndarray | int]:
    """Return the first problem of a shard, if any, and its counts; `lengths` are the bytes of text of each id."""
    file = shard.file
    try:
        for file, size, sha256 in manifest.files_of(shard):
            check_file(dataset_dir / file, size, sha256)
        return [], _read_shard(dataset_dir, manifest, shard, lengths)
    except UserError as error:
        return [str(error)], 0
    except OSError as error:
        return [str(damaged(dataset_dir / file, f"it cannot be read ({error.strerror})"))], 0


def _read_shard(
    dataset_dir: Path, manifest: Manifest, shard: Shard, lengths: np.ndarray
) -> np.ndarray:
    """Return the amount of each unit in each set, (sets, units), of a shard.

    Raises:
        UserError: a document does not match its record.
    """
    path, eot_id, n_vocab = (
        dataset_dir / shard.file,
        manifest.tokenizer.eot_id,
        manifest.tokenizer.n_vocab,
    )
    records = read_index(dataset_dir, manifest, shard)
    ends, set_numbers = records["end"].astype(np.int64), np.array(shard.sets)
    sets = np.zeros((len(manifest.set_names), len(Counts.model_fields)), np.int64)
    first = begin = 0
    with open_file(path) as file:
        while first < ends.size:
            last = max(first + 1, int(np.searchsorted(ends, begin + _IDS_AT_ONCE)))
            mine = ends[first:last] - begin
            ids = np.frombuffer(file.read(int(mine[-1]) * manifest.dtype.itemsize), manifest.dtype)
            if (highest := int(ids.max())) >= n_vocab:
                raise damaged(
                    path, f"it holds the id {highest}, its tokenizer's last is {n_vocab - 1}"
                )
            if not np.array_equal(np.flatnonzero(ids == eot_id) + 1, mine):
                raise damaged(
                    path, f"documents {first + 1} to {last} do not end where its index says"
                )
            starts = np.concatenate([[0], mine[:-1]])
            utf8_bytes = np.add.reduceat(lengths.take(ids, mode="clip"), starts, dtype=np.int64)
            for unit, amounts in enumerate(
                (mine - starts, None, utf8_bytes)
            ):  # as float64, exact below 2**53
                of_sets = np.bincount(records["set"][first:last], amounts, set_numbers.size)
                sets[set_numbers, unit] += of_sets.astype(np.int64)
            first, begin = last, begin + ids.size
    return sets


def _wrong(
    split: str, stated: dict[str, Counts], set_names: list[str], counts: np.ndarray
) -> Iterator[str]:
    """Describe the sets of a split with other amounts in the manifest than `counts` (sets, units) in the shards."""
    for name, amounts in zip(set_names, counts.tolist(), strict=True):
        found = Counts(**dict(zip(Counts.model_fields, amounts, strict=True)))
        if (found if found.documents else None) != stated.get(name):
            yield f"set {name!r} of {split} has {found} in the shards, {stated.get(name)} in the manifest"
