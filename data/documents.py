"""Finds documents in the shards of a dataset: where each is in its split, and its input."""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from common.files import open_file
from data.shards import HEADER, RECORD, Manifest, Shard, TokenStream, check_file, damaged

_WRONG = "its records are not those of the shard's documents"


class Origin(NamedTuple):
    """A document's position in its split, and its origin."""

    start: int
    stop: int
    """Its tokens in the split are [start, stop), <|endoftext|> included."""
    set_name: str
    input: str
    number: int
    """Its line or document number in `input`, from 1."""


def documents_in(stream: TokenStream, start: int, stop: int) -> Iterator[Origin]:
    """Yield the documents that tokens [start, stop) of a split belong to, in order.

    `stop` may lie behind the end of the split.

    Raises:
        UserError: an index is damaged.
    """
    manifest = stream.manifest
    split = manifest.splits[stream.split]
    for shard_number in range(bisect.bisect_right(split.ends, start), len(split.shards)):
        shard = split.shards[shard_number]
        offset = split.ends[shard_number] - shard.tokens
        first = max(start - offset, 0)
        last = min(stop - offset, shard.tokens)
        if first >= last:
            return
        set_names = [manifest.set_names[number] for number in shard.sets]
        records, document_start = _find(stream, shard, first, last)
        for end, input_number, number, set_number in records.tolist():
            input_name = manifest.inputs[input_number]
            yield Origin(
                offset + document_start, offset + end, set_names[set_number], input_name, number
            )
            document_start = end


def _find(stream: TokenStream, shard: Shard, first: int, last: int) -> tuple[np.ndarray, int]:
    """Return the records of the documents that a shard's tokens [first, last) belong to.

    Also return the token at which the first of them begins.
    """
    index = _open_index(stream, shard)
    number = bisect.bisect_right(index["end"][:-1], first)
    begin = int(index["end"][number - 1]) if number else 0
    records = index[number : number + last - first]  # each document has at least one token
    ends = records["end"]
    is_around = begin <= first < ends[0] and last <= ends[-1]
    if not is_around or not _are_possible(records, begin, stream.manifest, shard):
        raise damaged(stream.dataset_dir / shard.index_file, _WRONG)
    return records[: np.searchsorted(ends, last) + 1], begin


def document_ends(stream: TokenStream) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ends of a split's documents in it, and their sets, int64 (n,), shard by shard.

    Raises:
        UserError: an index is damaged.
    """
    shard_start = 0
    for shard in stream.manifest.splits[stream.split].shards:
        records = _read_index(stream, shard)
        yield shard_start + records["end"].astype(np.int64), np.array(shard.sets)[records["set"]]
        shard_start += shard.tokens


def _open_index(stream: TokenStream, shard: Shard) -> np.ndarray:
    """Map the index of a shard into memory: RECORD (documents,). Its size has been checked."""
    with open_file(stream.dataset_dir / shard.index_file) as file:
        return np.memmap(file, RECORD, "r", HEADER.size, (shard.documents,))


def _read_index(stream: TokenStream, shard: Shard) -> np.ndarray:
    """Return the whole index of a shard, RECORD (documents,), after checking its sum and records.

    Raises:
        UserError: it is damaged.
    """
    file, size, sha256 = stream.manifest.files_of(shard)[-1]
    path = stream.dataset_dir / file
    check_file(path, size, sha256)
    records = _open_index(stream, shard)
    ends_with_shard = int(records["end"][-1]) == shard.tokens
    if not ends_with_shard or not _are_possible(records, 0, stream.manifest, shard):
        raise damaged(path, _WRONG)
    return records


def _are_possible(records: np.ndarray, begin: int, manifest: Manifest, shard: Shard) -> bool:
    """Whether records are of documents in order, the first of which begins at token `begin`."""
    ends = records["end"]
    begins = np.append(np.array([begin], ends.dtype), ends[:-1])
    are_in_order = (begins < ends) & (ends <= shard.tokens)
    have_input = (records["input"] < len(manifest.inputs)) & (records["number"] > 0)
    have_set = records["set"] < len(shard.sets)
    return bool((are_in_order & have_input & have_set).all())


def sets_between(stream: TokenStream, start: int, stop: int) -> np.ndarray:
    """Return the set of each token [start, stop) of a split, a number into set_names.

    Returns:
        int64 (stop - start,).

    Raises:
        UserError: an index is damaged.
    """
    names = stream.manifest.set_names
    sets = np.empty(stop - start, np.int64)
    for document in documents_in(stream, start, stop):
        first = max(document.start - start, 0)
        sets[first : document.stop - start] = names.index(document.set_name)
    return sets
