"""Token ids made elsewhere: shards of llm.c, modded-nanogpt and nanoGPT, and .npy arrays.

llm.c's write_datafile (dev/data/data_common.py) writes a header of 256 int32 (magic, version,
number of ids), then the ids; modded-nanogpt writes the same with the magic of GPT-2. nanoGPT's
train.bin and val.bin have no header.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from data.prepare.items import NO_HEADER, CountBytes, Unreadable
from data.prepare.sources import NamedFiles

_HEADER = 256  # int32
# Type of the ids by magic and version: ids of GPT-2, and of Llama 3.
_FORMATS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
_MAGICS = {*(magic for magic, _ in _FORMATS), 20240522}  # the last: llm.c's evaluation files
# Ids of a document. A stream without end is cut, so that little of it is in memory.
_LONGEST = 2**22


class TokenSource(NamedFiles, defaults="data/tokens"):
    """Files of token ids, .bin or .npy. The end-of-text id ends a document."""

    suffixes: ClassVar[tuple[str, ...]] = (".bin", ".npy")

    name: Literal["tokens"]
    dtype: Literal["uint16", "uint32", "int32", "int64"] | None
    """Type of the ids in .bin files without a header; null: such files are refused."""
    _eot_id: int = -1

    def ended_by(self, eot_id: int) -> "TokenSource":
        """Return the source with documents that end with this id."""
        source = self.model_copy()
        source._eot_id = eot_id
        return source

    def read(self, path: Path, count_bytes: CountBytes) -> Iterator[Any]:
        """Yield documents."""
        if path.suffix.lower() == ".npy":
            for row in np.atleast_2d(_numpy_array(path)):
                yield from self._documents(row, count_bytes)
        else:
            yield from self._documents(_shard(path, self.dtype), count_bytes)

    def _documents(self, ids: np.ndarray, count_bytes: CountBytes) -> Iterator[np.ndarray]:
        """Cut ids (N,) after each end of text. Joined, the documents are the ids."""
        start = 0
        while start < ids.size:
            chunk = np.asarray(ids[start : start + _LONGEST])
            ends = np.flatnonzero(chunk == self._eot_id) + 1
            is_last = start + chunk.size == ids.size
            if is_last or not ends.size:
                ends = np.union1d(ends, [chunk.size])
            n_ids = int(ends[-1])
            yield from np.split(chunk[:n_ids], ends[:-1])
            start += n_ids
            count_bytes(n_ids * ids.itemsize)


def _numpy_array(path: Path) -> np.ndarray:
    """Map a .npy file of integers into memory, (N,) or (documents, N). Raises Unreadable."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except ValueError:  # no array, one of Python's objects, or less than its header says
        raise Unreadable("damaged .npy file, or not of numbers") from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise Unreadable("not an array of integers of one or two dimensions")
    return np.asarray(array)  # iterating over a memmap is slow


def _shard(path: Path, dtype: str | None) -> np.ndarray:
    """Map the ids of a .bin file into memory, (N,). Raises Unreadable."""
    if path.suffix.lower() != ".bin":
        raise Unreadable("neither .bin nor .npy")
    size = path.stat().st_size
    start = 0
    # Zeros stand for what a shorter file does not have.
    magic, version, n_ids = [*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0][:3]
    if magic in _MAGICS:
        if (magic, version) not in _FORMATS:
            raise Unreadable("a header of another version, or not of tokens")
        kind = np.dtype(_FORMATS[magic, version])
        start = 4 * _HEADER
        if size != start + n_ids * kind.itemsize:
            raise Unreadable("header does not match the file's size")
    elif dtype is None:
        raise Unreadable(NO_HEADER)
    else:
        kind = np.dtype(dtype).newbyteorder("<")
        if size % kind.itemsize:
            raise Unreadable(f"size is not a multiple of {kind.itemsize} bytes")
    if size == start:
        return np.empty(0, kind)  # nothing can be mapped
    return np.memmap(path, kind, "r", start)
