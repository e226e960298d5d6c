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
    problems = verify(dataset_dir, threads)
    for problem in problems:
        print_error(problem)
    if problems:
        raise SystemExit(1)
    manifest = parse_manifest(dataset_dir)
    total = total_of(split.total for split in manifest.splits.values())
    n_sets = count(len(manifest.set_names), "set")
    n_inputs = count(len(manifest.inputs), "input")
    say(
        f"{dataset_dir} is whole: {total.documents:,} documents, {total.tokens:,} tokens, "
        f"{n_sets}, {n_inputs}"
    )


def verify(dataset_dir: Path, threads: int | None = None) -> list[str]:
    """Return a line for the first problem of each shard of a dataset, or of its tokenizer.

    It checks the sums of all files, the documents, tokens and bytes of text of every set and split,
    that every id is in the tokenizer's vocabulary, and that the indexes say where documents end and
    where they are from.

    Args:
        threads: shards that are read at the same time; None: one for every CPU.
    """
    try:
        manifest = parse_manifest(dataset_dir)
        tokenizer = load_tokenizer(dataset_dir / TOKENIZER)
    except UserError as error:
        return [str(error)]
    if tokenizer.id != manifest.tokenizer:
        path = dataset_dir / TOKENIZER
        return [f"{path} is not the tokenizer of {MANIFEST}: prepare the dataset again"]
    lengths = tokenizer.byte_lengths.astype(np.min_scalar_type(tokenizer.byte_lengths.max()))
    check = partial(_check_shard, dataset_dir, manifest, lengths)
    n_shards = sum(len(split.shards) for split in manifest.splits.values())
    problems: list[str] = []
    pool = ThreadPoolExecutor(threads or os.cpu_count())
    try:
        with Track("verifying, shards", n_shards) as track:
            for name, split in manifest.splits.items():
                split_problems: list[str] = []
                counts = np.zeros((len(manifest.set_names), len(Counts.model_fields)), np.int64)
                for problem, shard_counts in pool.map(check, split.shards):
                    if problem is not None:
                        split_problems.append(problem)
                    counts += shard_counts
                    track.advance(1)
                if not split_problems:
                    for wrong in _wrong_counts(name, split.sets, manifest.set_names, counts):
                        split_problems.append(str(damaged(dataset_dir / MANIFEST, wrong)))
                problems += split_problems
    finally:
        pool.shutdown(cancel_futures=True)
    return problems


def _check_shard(
    dataset_dir: Path, manifest: Manifest, lengths: np.ndarray, shard: Shard
) -> tuple[str | None, np.ndarray | int]:
    """Return the first problem of a shard, if any, and its counts (sets, units).

    `lengths` are the bytes of text of each id.
    """
    path = dataset_dir / shard.file
    try:
        for file, size, sha256 in manifest.files_of(shard):
            path = dataset_dir / file
            check_file(path, size, sha256)
        return None, _read_shard(dataset_dir, manifest, shard, lengths)
    except UserError as error:
        return str(error), 0
    except OSError as error:
        return str(damaged(path, f"it cannot be read ({error.strerror})")), 0


def _read_shard(
    dataset_dir: Path, manifest: Manifest, shard: Shard, lengths: np.ndarray
) -> np.ndarray:
    """Return the amount of each unit in each set, (sets, units), of a shard.

    Raises:
        UserError: a document does not match its record.
    """
    path = dataset_dir / shard.file
    tokenizer = manifest.tokenizer
    records = read_index(dataset_dir, manifest, shard)
    ends = records["end"].astype(np.int64)
    set_numbers = np.array(shard.sets)
    counts = np.zeros((len(manifest.set_names), len(Counts.model_fields)), np.int64)
    first = 0  # document
    begin = 0  # token
    with open_file(path) as file:
        while first < ends.size:
            # Whole documents of about _IDS_AT_ONCE ids.
            last = max(first + 1, int(np.searchsorted(ends, begin + _IDS_AT_ONCE)))
            chunk_ends = ends[first:last] - begin
            content = file.read(int(chunk_ends[-1]) * manifest.dtype.itemsize)
            ids = np.frombuffer(content, manifest.dtype)
            highest = int(ids.max())
            if highest >= tokenizer.n_vocab:
                raise damaged(
                    path,
                    f"it holds the id {highest}, its tokenizer's last is {tokenizer.n_vocab - 1}",
                )
            if not np.array_equal(np.flatnonzero(ids == tokenizer.eot_id) + 1, chunk_ends):
                raise damaged(
                    path, f"documents {first + 1} to {last} do not end where its index says"
                )
            starts = np.concatenate([[0], chunk_ends[:-1]])
            utf8_bytes = np.add.reduceat(lengths.take(ids, mode="clip"), starts, dtype=np.int64)
            documents = np.ones(last - first)
            for unit, amounts in enumerate((chunk_ends - starts, documents, utf8_bytes)):
                # As float64, exact below 2**53.
                sums = np.bincount(records["set"][first:last], amounts, set_numbers.size)
                counts[set_numbers, unit] += sums.astype(np.int64)
            first = last
            begin += ids.size
    return counts


def _wrong_counts(
    split: str, stated: dict[str, Counts], set_names: list[str], counts: np.ndarray
) -> Iterator[str]:
    """Describe the sets of a split with other amounts in the manifest than in the shards.

    `counts`: (sets, units) of the shards.
    """
    for name, (tokens, documents, utf8_bytes) in zip(set_names, counts.tolist(), strict=True):
        actual = Counts(tokens=tokens, documents=documents, utf8_bytes=utf8_bytes)
        expected = stated.get(name)
        if expected is None and documents == 0:
            continue
        if actual != expected:
            yield (
                f"set {name!r} of {split} has {actual} in the shards, {expected} in the manifest"
            )
