"""Lines of a file that may be compressed and may be damaged: streamed, in bounded memory."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from common.settings import UserError

LONGEST_LINE = 2**28
_READ_BYTES = 4_096  # compressed; small, because a hostile archive can unpack to 30,000 times its size
_PIECE_BYTES = 2**21
_OTHERS = {".xz", ".bz2", ".zip", ".7z", ".rar", ".tar", ".parquet", ".arrow"}


class DamagedArchive(Exception):
    """A compressed file that ends too early or holds something else; `reason` says which."""

    def __init__(self, reason: Literal["corrupted archive", "truncated archive"]) -> None:
        self.reason: Literal["corrupted archive", "truncated archive"] = reason


def read_lines(path: Path, seen: Callable[[int], object]) -> Iterator[bytes | bytearray | None]:
    r"""Lines of a plain, .gz or .zst file without their b"\n", which alone ends a line: texts contain U+2028 and "\r".

    A line of more than LONGEST_LINE bytes is None: it is passed over.
    `seen` is told how many more bytes of the file itself have been read.

    Raises:
        OSError: the file cannot be read.
        DamagedArchive: after the last line that could be read whole.
    """
    begun: bytearray | None = bytearray()  # of the line that the next chunk goes on with; None: too long
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


def _chunks(path: Path, seen: Callable[[int], object]) -> Iterator[bytes]:
    """The file's content, decompressed by its suffix, in pieces of bounded size.

    Raises:
        UserError: it is of a kind that this program does not read.
    """
    suffix = path.suffix.lower()
    if suffix in _OTHERS:
        raise UserError(f"{path} is not .jsonl, .jsonl.gz or .jsonl.zst: decompress or convert it")
    if suffix == ".zst":
        from zstandard import ZstdDecompressor, ZstdError

        return _decompressed(_raw(path, seen), lambda: ZstdDecompressor().decompressobj(), ZstdError)
    if suffix == ".gz":
        return _decompressed(_raw(path, seen), lambda: zlib.decompressobj(wbits=31), zlib.error)
    return _raw(path, seen)


def _raw(path: Path, seen: Callable[[int], object]) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            seen(len(chunk))
            yield chunk


def _decompressed(raw: Iterator[bytes], new_frame: Callable[[], Any], broken: type[Exception]) -> Iterator[bytes]:
    """An archive may hold several frames (.zst) or members (.gz), one after the other."""
    frame = None
    for chunk in raw:
        while chunk:
            frame = frame or new_frame()
            try:
                content = frame.decompress(chunk)
            except broken:
                raise DamagedArchive("corrupted archive") from None
            for start in range(0, len(content), _PIECE_BYTES):  # of 2 MB, even if all of them are ends of lines
                yield content[start : start + _PIECE_BYTES]
            chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise DamagedArchive("truncated archive")
