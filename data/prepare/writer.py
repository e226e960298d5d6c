"""Writing shards, so that a process that is killed can go on where it was.

Now and then: `flush()`, then keep `state()` on the disk. To go on: a new writer with that state.
"""

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from pydantic import Field

from common.settings import UserError
from data.shards import (
    HEADER,
    RECORD,
    Count,
    Counts,
    Shard,
    Split,
    SplitName,
    Strict,
    check_size,
    index_file,
    index_header,
    shard_file,
    token_dtype,
)

_RECORD = struct.Struct("<QIQH")
_BUFFER = 2**20
assert _RECORD.size == RECORD.itemsize


class Names:
    """Names numbered in the order of their first use: the manifest's `inputs` and `set_names`."""

    def __init__(self, what: str, limit: int, names: Iterable[str] = ()) -> None:
        self.what, self.limit = what, limit
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        for name in names:
            self.number(name)

    def number(self, name: str) -> int:
        """The number of a name, a new one if it was not used before.

        Raises:
            UserError: there are more names than numbers.
        """
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            if number >= self.limit:
                raise UserError(f"{name!r} is one more than the {self.limit:,} {self.what} a dataset can hold")
            self.names.append(name)
        return number


class OpenShard(Strict):
    """A shard that is not full yet."""

    tokens: Count
    documents: Count


class WriterState(Strict):
    """How far a split has been written."""

    shards: list[Shard] = Field(default_factory=list)
    """Those that are full."""
    open: OpenShard | None = None
    """The one after them."""
    sets: dict[str, Counts] = Field(default_factory=dict)


class ShardWriter:
    """Writes one split's shards and their indexes, a context manager.

    A shard is full with the document that reaches `shard_tokens`.
    """

    def __init__(
        self,
        directory: Path,
        split: SplitName,
        n_vocab: int,
        shard_tokens: int,
        set_names: Names,
        inputs: Names,
        state: WriterState | None = None,
    ) -> None:
        """Start a split, or go on after `state`; what the files hold beyond it is cut off.

        Raises:
            UserError: a file of that state is missing or shorter.
        """
        self.directory, self.split, self.n_vocab, self.shard_tokens = directory, split, n_vocab, shard_tokens
        self.set_names, self.inputs = set_names, inputs
        self.dtype = token_dtype(n_vocab)
        state = state or WriterState()
        self._shards = list(state.shards)
        self._sets = {name: [counts.tokens, counts.documents, counts.utf8_bytes] for name, counts in state.sets.items()}
        self._tokens = self._documents = 0
        self._ids: _HashedFile | None = None
        for shard in state.shards:
            check_size(directory / shard.file, shard.tokens * self.dtype.itemsize)
            check_size(directory / shard.index_file, shard.index_size)
        if state.open is not None:
            self._open_shard(state.open)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._ids is not None:
            self._ids.abandon()
            self._index.abandon()

    def append(self, ids: np.ndarray, set_name: str, utf8_bytes: int, input: str, number: int) -> None:
        """Add one document: its ids (n,) with <|endoftext|> at the end, the size of its text, and where it was found.

        `number` is its line or document number in `input`, from 1.
        """
        if self._ids is None:
            self._open_shard(OpenShard(tokens=0, documents=0))
        assert self._ids is not None
        self._tokens += ids.size
        self._documents += 1
        self._ids.write(ids.astype(self.dtype, copy=False).tobytes())
        numbers = self.inputs.number(input), number, self.set_names.number(set_name)
        self._index.write(_RECORD.pack(self._tokens, *numbers))
        counts = self._sets.setdefault(set_name, [0, 0, 0])
        counts[0] += ids.size
        counts[1] += 1
        counts[2] += utf8_bytes
        if self._tokens >= self.shard_tokens:
            self._close_shard()

    def flush(self) -> None:
        """Bring everything that `state` counts to the disk."""
        if self._ids is not None:
            self._ids.flush()
            self._index.flush()

    def state(self) -> WriterState:
        """Everything appended so far; a writer started with it goes on as if this one had never stopped."""
        now = None if self._ids is None else OpenShard(tokens=self._tokens, documents=self._documents)
        return WriterState(shards=list(self._shards), open=now, sets=self._counted())

    def finish(self) -> Split:
        """Close the last shard and give the split's part of the manifest, its sets by name."""
        if self._ids is not None:
            self._close_shard()
        return Split(sets=self._counted(), shards=self._shards)

    def _counted(self) -> dict[str, Counts]:
        counted = sorted(self._sets.items())
        return {name: Counts(tokens=n[0], documents=n[1], utf8_bytes=n[2]) for name, n in counted}

    def _open_shard(self, written: OpenShard) -> None:
        self._tokens, self._documents = written.tokens, written.documents
        file = shard_file(self.split, len(self._shards))
        kept = HEADER.size + written.documents * RECORD.itemsize if written.documents else 0
        index_path = self.directory / index_file(file)
        _check_written(index_path, kept)
        self._ids = _HashedFile(self.directory / file, written.tokens * self.dtype.itemsize)
        self._index = _HashedFile(index_path, kept)
        if not kept:
            self._index.write(index_header(self.n_vocab))

    def _close_shard(self) -> None:
        assert self._ids is not None
        shard = Shard(
            file=shard_file(self.split, len(self._shards)),
            tokens=self._tokens,
            documents=self._documents,
            sha256=self._ids.close(),
            index_sha256=self._index.close(),
        )
        self._ids = None
        self._shards.append(shard)


def _check_written(path: Path, n_bytes: int) -> None:
    if n_bytes and not (path.is_file() and path.stat().st_size >= n_bytes):
        raise UserError(f"{path} is missing or shorter than it was: delete {path.parent} and start again")


class _HashedFile:
    """A file that is written once from beginning to end, and the sha256 of it."""

    def __init__(self, path: Path, kept: int = 0) -> None:
        """Start it, or go on after its first `kept` bytes."""
        self._sha256 = hashlib.sha256()
        if kept:
            _check_written(path, kept)
            self._read_again(path, kept)
            os.truncate(path, kept)
        self._file = open(path, "ab" if kept else "wb", buffering=_BUFFER)  # noqa: SIM115

    def _read_again(self, path: Path, kept: int) -> None:
        with open(path, "rb") as file:
            while kept:
                block = file.read(min(kept, _BUFFER))
                self._sha256.update(block)
                kept -= len(block)

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._sha256.update(content)

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> str:
        """Bring it to the disk; returns its sum."""
        self.flush()
        self._file.close()
        return self._sha256.hexdigest()

    def abandon(self) -> None:
        """Close it in whatever state; on a full disk not even that succeeds."""
        with contextlib.suppress(OSError):
            self._file.close()
