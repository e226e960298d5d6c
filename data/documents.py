"""Finds documents in the shards of a dataset: where each is in its split, and which input it came from."""

import bisect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.files import open_file
from data.shards import HEADER, RECORD, Manifest, Shard, SplitName, check_file, damaged


class Origin(NamedTuple):
    """A document's position in its split, and its origin."""

    start: int
    stop: int
    """Its tokens in the split are [start, stop), <|endoftext|> included."""
    set_name: str
    input: str
    number: int
    """Its line or document number in `input`, from 1."""


def documents_in(
    dataset_dir: Path, manifest: Manifest, split: SplitName, start: int, stop: int
) -> Iterator[Origin]:
    """Yield the documents that tokens [start, stop) of a split belong to, in order; the split may end before.

    Raises:
        UserError: an index is damaged.
    """
    shards, ends = manifest.splits[split].shards, manifest.splits[split].ends
    for place in range(bisect.bisect_right(ends, start), len(shards)):
        shard, begin = shards[place], ends[place] - shards[place].tokens
        first, last = max(start - begin, 0), min(stop - begin, shard.tokens)
        if first >= last:
            return
        names = [manifest.set_names[number] for number in shard.sets]
        records, token = _find(dataset_dir, manifest, shard, first, last)
        for end, input_, number, set_ in records.tolist():
            yield Origin(begin + token, begin + end, names[set_], manifest.inputs[input_], number)
            token = end


def _find(
    dataset_dir: Path, manifest: Manifest, shard: Shard, first: int, last: int
) -> tuple[np.ndarray, int]:
    """Return the records of the documents that a shard's tokens [first, last) belong to, and where they begin."""
    index = open_index(dataset_dir, shard)
    number = bisect.bisect_right(index["end"][:-1], first)
    begin = int(index["end"][number - 1]) if number else 0
    records = index[number : number + last - first]  # each document has at least one token
    ends = records["end"]
    wrong = wrong_record(records, begin, manifest, shard)
    if wrong or not begin <= first < ends[0] or ends[-1] < last:
        raise damaged(dataset_dir / shard.index_file, wrong or "documents are not in order")
    return records[: np.searchsorted(ends, last) + 1], begin


def open_index(dataset_dir: Path, shard: Shard) -> np.ndarray:
    """Map the index of a shard into memory: RECORD (documents,).

    Raises:
        UserError: it is shorter than its manifest says.
    """
    path = dataset_dir / shard.index_file
    with open_file(path) as file:
        try:
            return np.memmap(file, RECORD, "r", HEADER.size, (shard.documents,))
        except ValueError:
            raise damaged(path, "it is shorter than its manifest says") from None


def read_index(dataset_dir: Path, manifest: Manifest, shard: Shard) -> np.ndarray:
    """Return the whole index of a shard, RECORD (documents,), after checking its sum and every record.

    Raises:
        UserError: it is damaged.
    """
    file, size, sha256 = manifest.files_of(shard)[-1]
    path = dataset_dir / file
    check_file(path, size, sha256)
    records = open_index(dataset_dir, shard)
    if wrong := wrong_record(records, 0, manifest, shard):
        raise damaged(path, wrong)
    if (end := int(records["end"][-1])) != shard.tokens:
        raise damaged(path, f"its last document ends at token {end} of {shard.tokens}")
    return records


def wrong_record(records: np.ndarray, begin: int, manifest: Manifest, shard: Shard) -> str | None:
    """Return why the first invalid record is invalid, or None. The first document begins at token `begin`."""
    ends, inputs, sets = records["end"], records["input"], records["set"]
    begins = np.concatenate([np.array([begin], ends.dtype), ends[:-1]])
    for wrong, what in (
        (ends <= begins, "end at token {end}, where it begins or before"),
        (ends > shard.tokens, f"end at token {{end}} of {shard.tokens}"),
        (inputs >= len(manifest.inputs), f"be from input {{input}} of {len(manifest.inputs)}"),
        (sets >= (n_sets := len(shard.sets)), f"be of set {{set}} of {n_sets}"),
        (records["number"] == 0, "have the number {number} in its input"),
    ):
        if wrong.any():
            return "a document is said to " + what.format_map(records[wrong.argmax()])
    return None


def sets_between(
    dataset_dir: Path, manifest: Manifest, split: SplitName, start: int, stop: int
) -> np.ndarray:
    """Return the set of each token [start, stop) of a split, a number into set_names: int64 (stop - start,).

    Raises:
        UserError: an index is damaged.
    """
    sets = np.empty(stop - start, np.int64)
    for place in documents_in(dataset_dir, manifest, split, start, stop):
        sets[max(place.start - start, 0) : place.stop - start] = manifest.set_names.index(
            place.set_name
        )
    return sets
