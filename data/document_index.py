"""Finds documents in the shards of a dataset: where each is in its split, and its input."""

import bisect
import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from data.shards import HEADER, RECORD, TokenStream, check_file, damage_error


class Origin(NamedTuple):
    """A document's position in its split, and its origin."""

    start: int
    stop: int
    """Its tokens in the split are [start, stop), <|endoftext|> included."""
    set_name: str
    input: str
    number: int
    """Its line or document number in `input`, from 1."""


def find_documents(stream: TokenStream, start: int, stop: int) -> Iterator[Origin]:
    """Yield the documents that tokens [start, stop) of a split belong to, in order.

    `stop` may lie behind the end of the split.

    Raises:
        UserError: an index is damaged.
    """
    manifest = stream.manifest
    shard_ends = manifest.splits[stream.split].ends
    for shard in range(bisect.bisect_right(shard_ends, start), len(shard_ends)):
        records = _read_index(stream, shard)
        first = bisect.bisect_right(records["end"], start)
        last = bisect.bisect_left(records["end"], stop) + 1
        document_start = shard_ends[shard - 1] if shard else 0
        if first:
            document_start = int(records["end"][first - 1])
        for end, input_number, number, set_number in records[first:last].tolist():
            set_name = manifest.set_names[set_number]
            yield Origin(document_start, end, set_name, manifest.inputs[input_number], number)
            document_start = end
        if stop <= shard_ends[shard]:
            return


def read_ends(stream: TokenStream) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ends of a split's documents in it, and their sets, int64 (n,), shard by shard.

    Raises:
        UserError: an index is damaged.
    """
    for shard in range(len(stream.manifest.splits[stream.split].shards)):
        records = _read_index(stream, shard)
        yield records["end"].astype(np.int64), records["set"].astype(np.int64)


@functools.lru_cache(maxsize=2)
def _read_index(stream: TokenStream, number: int) -> np.ndarray:
    """Return the documents of a shard: RECORD (n,), with their ends in the split.

    Their sets are numbers into the manifest's set_names.
    """
    manifest = stream.manifest
    split = manifest.splits[stream.split]
    shard = split.shards[number]
    path = stream.dataset_dir / shard.index_file
    _, size, sha256 = manifest.files_of(shard)[-1]
    check_file(path, size, sha256)
    records = np.fromfile(path, RECORD, offset=HEADER.size)
    # The sum is right, so the records are as they were written. The manifest may be of another.
    end, last_set, last_input = (int(records[key].max()) for key in ("end", "set", "input"))
    are_known = last_set < len(shard.sets) and max(shard.sets) < len(manifest.set_names)
    if end != shard.tokens or not are_known or last_input >= len(manifest.inputs):
        raise damage_error(path, "its records are not those of the shard's documents")
    records["end"] += split.ends[number] - shard.tokens
    records["set"] = np.array(shard.sets)[records["set"]]
    return records


def read_sets(stream: TokenStream, start: int, stop: int) -> np.ndarray:
    """Return the set of each token [start, stop) of a split, a number into set_names.

    Returns:
        int64 (stop - start,).

    Raises:
        UserError: an index is damaged.
    """
    names = stream.manifest.set_names
    sets = np.empty(stop - start, np.int64)
    for document in find_documents(stream, start, stop):
        first = max(document.start - start, 0)
        sets[first : document.stop - start] = names.index(document.set_name)
    return sets
