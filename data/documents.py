"""Finding documents in the shards of a dataset: all of a split in order, or the one that a token belongs to."""

import bisect
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from common.files import open_file
from common.settings import UserError
from data.shards import HEADER, RECORD, Manifest, Shard, SplitName, check_sum

_RECORDS_AT_ONCE = 2**14
_FIELDS = ("end", "input", "number", "set")


class Document(NamedTuple):
    """One document of a dataset."""

    ids: np.ndarray
    """Token ids (n,) in the type of the shards, <|endoftext|> last."""
    set_name: str
    input: str
    number: int
    """Its line or document number in `input`, from 1."""


class Place(NamedTuple):
    """Where a document stands in its split, and where it came from."""

    start: int
    stop: int
    """Its tokens in the split are [start, stop), <|endoftext|> included."""
    set_name: str
    input: str
    number: int
    """Its line or document number in `input`, from 1."""


def read_documents(dataset_dir: Path, manifest: Manifest, split: SplitName) -> Iterator[Document]:
    """Yield all documents of a split in order, with one document and a piece of an index in memory.

    Raises:
        UserError: a file is damaged. Its sum is checked at its end: documents before that may be wrong.
    """
    for shard in manifest.splits[split].shards:
        path, sha256, done = dataset_dir / shard.file, hashlib.sha256(), 0
        with open_file(path) as file:
            for records in read_records(dataset_dir, manifest, shard):
                for end, input_, number, set_ in records.tolist():
                    content = _read(file, (end - done) * manifest.dtype.itemsize, path)
                    sha256.update(content)
                    ids = np.frombuffer(content, manifest.dtype)
                    yield Document(ids, manifest.set_names[set_], manifest.inputs[input_], number)
                    done = end
        check_sum(path, sha256.hexdigest(), shard.sha256)


def read_records(dataset_dir: Path, manifest: Manifest, shard: Shard) -> Iterator[np.ndarray]:
    """Yield a shard's index in pieces, arrays of RECORD (n,) that are valid for the shard and the manifest.

    Raises:
        UserError: the index is damaged. Its sum is checked at its end: records before that may be wrong.
    """
    path, done = dataset_dir / shard.index_file, 0
    with open_file(path) as file:
        sha256 = hashlib.sha256(_read(file, HEADER.size, path))
        for first in range(0, shard.documents, _RECORDS_AT_ONCE):
            count = min(_RECORDS_AT_ONCE, shard.documents - first)
            content = _read(file, count * RECORD.itemsize, path)
            sha256.update(content)
            records = np.frombuffer(content, RECORD)
            if wrong := wrong_record(records, done, manifest, shard):
                raise UserError(f"{path} is damaged: {wrong}: prepare the dataset again")
            yield records
            done = int(records["end"][-1])
    check_sum(path, sha256.hexdigest(), shard.index_sha256)


def wrong_record(records: np.ndarray, begin: int, manifest: Manifest, shard: Shard) -> str | None:
    """Return why the first invalid record is invalid, or None. The first document begins at token `begin`."""
    ends, inputs, sets = records["end"], records["input"], records["set"]
    begins = np.concatenate([np.array([begin], ends.dtype), ends[:-1]])
    for wrong, what in (
        (ends <= begins, "end at token {end}, where it begins or before"),
        (ends > shard.tokens, f"end at token {{end}} of {shard.tokens}"),
        (inputs >= len(manifest.inputs), f"be from input {{input}} of {len(manifest.inputs)}"),
        (sets >= len(manifest.set_names), f"be of set {{set}} of {len(manifest.set_names)}"),
        (records["number"] == 0, "have the number {number} in its input"),
    ):
        if wrong.any():
            record = dict(zip(_FIELDS, records[int(wrong.argmax())].tolist(), strict=True))
            return "a document is said to " + what.format(**record)
    return None


def sets_between(dataset_dir: Path, manifest: Manifest, split: SplitName, start: int, stop: int) -> np.ndarray:
    """Return the set of each token [start, stop) of a split, a number into set_names: int64 (stop - start,).

    Raises:
        UserError: an index is damaged.
    """
    begin, parts = 0, [np.empty(0, np.int64)]
    for shard in manifest.splits[split].shards:
        first, last = max(start - begin, 0), min(stop - begin, shard.tokens)
        if first < last:
            parts.append(_sets_in_shard(dataset_dir, manifest, shard, first, last))
        begin += shard.tokens
    return np.concatenate(parts)


def _sets_in_shard(dataset_dir: Path, manifest: Manifest, shard: Shard, start: int, stop: int) -> np.ndarray:
    path = dataset_dir / shard.index_file
    with open_file(path) as file:
        number, begin = _document_of(file, path, shard, start)
        file.seek(HEADER.size + number * RECORD.itemsize)
        count = min(stop - start, shard.documents - number)  # each document has at least one token
        records = np.frombuffer(_read(file, count * RECORD.itemsize, path), RECORD)
    which = np.searchsorted(records["end"], np.arange(start, stop, dtype=np.uint64), side="right")
    wrong = wrong_record(records, begin, manifest, shard)
    if wrong or which[-1] == count or not begin <= start:
        raise UserError(f"{path} is damaged: {wrong or 'documents are not in order'}: prepare the dataset again")
    return records["set"][which].astype(np.int64)


def _document_of(file: BinaryIO, path: Path, shard: Shard, token: int) -> tuple[int, int]:
    """Return number and first token of the document that holds a shard's token, by bisection in the index file."""

    def end(i: int) -> int:
        file.seek(HEADER.size + i * RECORD.itemsize)
        return int(np.frombuffer(_read(file, RECORD.itemsize, path), RECORD)["end"][0])

    number = bisect.bisect_right(range(shard.documents - 1), token, key=end)
    return number, end(number - 1) if number else 0


def document_at(dataset_dir: Path, manifest: Manifest, split: SplitName, token: int) -> Place:
    """Return the document that token number `token` of a split belongs to.

    Raises:
        UserError: the index is damaged.
    """
    begin = 0
    for shard in manifest.splits[split].shards:
        if 0 <= token < begin + shard.tokens:
            break
        begin += shard.tokens
    else:
        raise IndexError(f"token {token} of {begin} in {split}")
    path = dataset_dir / shard.index_file
    with open_file(path) as file:
        place, start = _document_of(file, path, shard, token - begin)
        file.seek(HEADER.size + place * RECORD.itemsize)
        found = np.frombuffer(_read(file, RECORD.itemsize, path), RECORD)
    wrong = wrong_record(found, start, manifest, shard)
    end, input_, number, set_ = found.tolist()[0]
    if wrong or not start <= token - begin < end:
        raise UserError(f"{path} is damaged: {wrong or 'documents are not in order'}: prepare the dataset again")
    return Place(begin + start, begin + end, manifest.set_names[set_], manifest.inputs[input_], number)


def _read(file: BinaryIO, n_bytes: int, path: Path) -> bytes:
    content = file.read(n_bytes)
    if len(content) < n_bytes:
        raise UserError(f"{path} is shorter than its manifest says: prepare the dataset again")
    return content


def documents_in(dataset_dir: Path, manifest: Manifest, split: SplitName, start: int, stop: int) -> Iterator[Place]:
    """Yield the documents that tokens [start, stop) of a split belong to, in order; the split may end before."""
    stop = min(stop, manifest.splits[split].total.tokens)
    while start < stop:
        place = document_at(dataset_dir, manifest, split, start)
        yield place
        start = place.stop
