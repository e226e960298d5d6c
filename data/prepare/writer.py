"""Writing the shards of a dataset and their indexes."""

import contextlib
import hashlib
import os
from pathlib import Path

import numpy as np

from data.shards import Shard, SplitName, index_file, index_header, shard_file, token_dtype

_BUFFER = 2**20


class HashedFile:
    """A file that is written once from beginning to end, and its sha256. A context manager."""

    def __init__(self, path: Path) -> None:
        self._sha256 = hashlib.sha256()
        self._file = open(path, "wb", buffering=_BUFFER)  # noqa: SIM115

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # on a full disk not even closing succeeds
            self._file.close()

    def write(self, content: bytes | memoryview) -> None:
        """Append some bytes."""
        self._file.write(content)
        self._sha256.update(content)

    def finish(self) -> str:
        """Sync the file to the disk and return its sum."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._sha256.hexdigest()


class ShardWriter:
    """Writes the shards of one split. A context manager.

    A shard is full with the document that reaches `shard_tokens`.
    """

    def __init__(self, directory: Path, split: SplitName, n_vocab: int, shard_tokens: int) -> None:
        self.directory, self.split, self.n_vocab, self.shard_tokens = directory, split, n_vocab, shard_tokens
        self.dtype = token_dtype(n_vocab)
        self._shards: list[Shard] = []
        self._tokens = self._documents = 0
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def append(self, ids: np.ndarray, lengths: np.ndarray, records: np.ndarray) -> None:
        """Add documents that follow each other.

        Args:
            ids: their token ids, each document ended by <|endoftext|>.
            lengths: how many of the ids each document has, (n,).
            records: RECORD (n,); their `end` is filled in here.
        """
        ids = ids.astype(self.dtype, copy=False)
        ends = np.cumsum(lengths)
        first = begin = 0
        while first < ends.size:
            if self._tokens == 0:
                self._open_shard()
            full = int(np.searchsorted(ends, begin + self.shard_tokens - self._tokens)) + 1
            stop = int(ends[:full][-1])
            now = records[first:full].copy()
            now["end"] = ends[first:full] - begin + self._tokens
            self._ids.write(ids[begin:stop].data)
            self._index.write(now.tobytes())
            self._tokens += stop - begin
            self._documents += now.size
            if self._tokens >= self.shard_tokens:
                self._close_shard()
            first, begin = full, stop

    def finish(self) -> list[Shard]:
        """Close the last shard and return all of them."""
        if self._tokens:
            self._close_shard()
        return self._shards

    def _open_shard(self) -> None:
        file = shard_file(self.split, len(self._shards))
        self._ids = self._open.enter_context(HashedFile(self.directory / file))
        self._index = self._open.enter_context(HashedFile(self.directory / index_file(file)))
        self._index.write(index_header(self.n_vocab))

    def _close_shard(self) -> None:
        shard = Shard(
            file=shard_file(self.split, len(self._shards)),
            tokens=self._tokens,
            documents=self._documents,
            sha256=self._ids.finish(),
            index_sha256=self._index.finish(),
        )
        self._shards.append(shard)
        self._open.close()
        self._tokens = self._documents = 0
