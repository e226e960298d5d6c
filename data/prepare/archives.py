"""Reading the lines of files that may be compressed or damaged, in bounded memory."""

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.files import open_file
from common.settings import UserError
from data.prepare.items import LONG_WINDOW, Seen, Unreadable

LONGEST_LINE = 2**28
_READ_BYTES = 4_096  # compressed; small, because a hostile archive can unpack to 30,000 times its size
_PIECE_BYTES = 2**21  # decompressed; small enough to split even if it is nothing but newlines
_OTHERS = {".xz", ".bz2", ".zip", ".7z", ".rar", ".tar", ".parquet", ".arrow"}


def read_lines(path: Path, seen: Seen) -> Iterator[bytes | bytearray | None]:
    r"""Yield the lines of a plain, .gz or .zst file, without b"\n". Nothing else ends a line, not U+2028 or "\r".

    A line of more than LONGEST_LINE bytes is skipped: None.

    Raises:
        OSError: the file cannot be read.
        Unreadable: the archive is damaged; after the last complete line.
    """
    begun: bytearray | None = bytearray()  # the line that the next chunk continues; None if it is too long
    for chunk in _chunks(path, seen):
        first, *others = chunk.split(b"\n")
        if begun is not None:
            begun += first
            begun = begun if len(begun) <= LONGEST_LINE else None
        if others:
            yield begun
            yield from others[:-1]
            begun = bytearray(others[-1])
    if begun is None or begun:
        yield begun


def read_bytes(path: Path, seen: Seen, n_bytes: int) -> Iterator[bytes]:
    """Yield the content of a file in pieces of `n_bytes`."""
    try:  # a data file may be a link
        file = open_file(Path(os.path.realpath(path)))
    except UserError:
        raise Unreadable("not a regular file") from None
    with file:
        while chunk := file.read(n_bytes):
            seen(len(chunk))
            yield chunk


def _chunks(path: Path, seen: Seen) -> Iterator[bytes]:
    """Yield the content of a file in pieces of bounded size, decompressed as its suffix says.

    Raises:
        UserError: files with this suffix are not supported.
    """
    raw, suffix = read_bytes(path, seen, _READ_BYTES), path.suffix.lower()
    if suffix in _OTHERS:
        raise UserError(f"{path} is not .jsonl, .jsonl.gz or .jsonl.zst: decompress or convert it")
    if suffix == ".zst":
        from zstandard import ZstdDecompressor, ZstdError

        return _decompressed(raw, lambda: ZstdDecompressor().decompressobj(), ZstdError)
    if suffix == ".gz":
        return _decompressed(raw, lambda: zlib.decompressobj(wbits=31), zlib.error, padded=True)
    return raw


def _decompressed(
    raw: Iterator[bytes], new_frame: Callable[[], Any], broken: type[Exception], padded: bool = False
) -> Iterator[bytes]:
    """Decompress an archive, which may hold several frames (.zst) or members (.gz) in a row.

    `padded`: ignore zeros after a member; tapes and block devices pad .gz files with zeros.
    """
    frame, begun = None, False
    for chunk in raw:
        while chunk:
            if padded and begun and frame is None and not (chunk := chunk.lstrip(b"\0")):
                break
            frame, begun = frame or new_frame(), True
            try:
                content = frame.decompress(chunk)
            except broken as error:
                raise Unreadable(LONG_WINDOW if "too much memory" in str(error) else "corrupted archive") from None
            for start in range(0, len(content), _PIECE_BYTES):
                yield content[start : start + _PIECE_BYTES]
            chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise Unreadable("truncated archive")
