"""Writing the shards of a dataset and their indexes."""

import os
from pathlib import Path

import numpy as np

from common.files import sha256_file
from data.shards import Shard, SplitName, index_file, index_header, shard_file, token_dtype


class ShardWriter:
    """Writes the shards of one split into an empty folder.

    A shard is full with the document that reaches `shard_tokens`.
    """

    def __init__(self, directory: Path, split: SplitName, n_vocab: int, shard_tokens: int) -> None:
        self.directory, self.split, self.n_vocab, self.shard_tokens = directory, split, n_vocab, shard_tokens
        self._shards: list[Shard] = []
        self._tokens = self._documents = 0  # of the shard that is being written

    def append(self, ids: np.ndarray, lengths: np.ndarray, records: np.ndarray) -> None:
        """Add documents that follow each other.

        Args:
            ids: their token ids, each document ended by <|endoftext|>.
            lengths: how many of the ids each document has, (n,).
            records: RECORD (n,); their `end` is filled in here.
        """
        ids = ids.astype(token_dtype(self.n_vocab), copy=False)
        ends = np.cumsum(lengths)
        first = begin = 0
        while first < ends.size:
            full = int(np.searchsorted(ends, begin + self.shard_tokens - self._tokens)) + 1
            stop = int(ends[:full][-1])
            now = records[first:full].copy()
            now["end"] = ends[first:full] - begin + self._tokens
            file = shard_file(self.split, len(self._shards))
            with open(self.directory / file, "ab") as tokens, open(self.directory / index_file(file), "ab") as index:
                if self._tokens == 0:
                    index.write(index_header(self.n_vocab))
                tokens.write(ids[begin:stop].tobytes())
                index.write(now.tobytes())
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

    def _close_shard(self) -> None:
        file = shard_file(self.split, len(self._shards))
        shard = Shard(
            file=file,
            tokens=self._tokens,
            documents=self._documents,
            sha256=_synced(self.directory / file),
            index_sha256=_synced(self.directory / index_file(file)),
        )
        self._shards.append(shard)
        self._tokens = self._documents = 0


def _synced(path: Path) -> str:
    """Sync a file to the disk and return its sha256."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return sha256_file(path)
