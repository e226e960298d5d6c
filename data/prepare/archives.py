"""Reading files that may be compressed, damaged, or in another encoding, in bounded memory."""

import codecs
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from common.files import open_file
from data.prepare.items import BINARY, LONG_WINDOW, NOT_JSON, NOT_UTF8, Seen, Unreadable

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
LONGEST_LINE = 2**28
_READ_BYTES = 2**20
_PACKED_BYTES = 4_096  # small, because a hostile archive can unpack to 30,000 times its size, .bz2 to a million times
_PIECE_BYTES = 2**21  # decompressed; small enough to split even if it is nothing but newlines
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # begins as the mark of UTF-16 does
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_CONTROLS = bytes(
    {*range(32), 127} - {*b"\b\t\n\v\f\r\x1a\x1b"}
)  # without those that texts and logs may have


def read_lines(path: Path, seen: Seen) -> Iterator[bytes | bytearray | None]:
    r"""Yield the lines of a file that `read_utf8` reads, without b"\n". Nothing else ends a line, not U+2028 or "\r".

    A line of more than LONGEST_LINE bytes is skipped: None. Errors are those of `read_utf8`.
    """
    begun: bytearray | None = (
        bytearray()
    )  # the line that the next chunk continues; None if it is too long
    for chunk in read_utf8(path, seen):
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


def parse_line(line: bytes | bytearray) -> Any:
    """Return the JSON value of a line. Raises Unreadable."""
    try:
        return orjson.loads(line)
    except (
        ValueError
    ):  # json accepts more (a byte order mark, NaN, half characters), and names the reason
        pass
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise Unreadable(NOT_UTF8) from None
    except (ValueError, RecursionError):
        raise Unreadable(NOT_JSON) from None


def read_text(path: Path, seen: Seen) -> Iterator[str]:
    """Yield the text of a file in chunks of bounded size. Raises Unreadable with the line that is not UTF-8."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    try:
        for content in read_utf8(path, seen):
            text = decoder.decode(content)
            yield text
            line += text.count("\n")
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        reason = BINARY if _n_controls(error.object) else NOT_UTF8
        raise Unreadable(reason, line + error.object.count(b"\n", 0, error.start)) from None


def read_utf8(path: Path, seen: Seen) -> Iterator[bytes]:
    """Yield the content of a file in pieces of bounded size, decompressed as its suffix says (COMPRESSED).

    A byte order mark is left out. UTF-16 and UTF-32 that begin with one become UTF-8.

    Raises:
        OSError: the file cannot be read.
        Unreadable: its beginning is not text, or the archive is damaged; after its last whole piece.
    """
    chunks = _content(path, seen)
    head = next(chunks, b"")
    mark = next((mark for mark in _MARKS if head.startswith(mark)), b"")
    encoding = _MARKS.get(mark, "utf-8")
    pieces: Iterator[bytes] = itertools.chain([head.removeprefix(mark)], chunks)
    if encoding != "utf-8":
        pieces = (text.encode() for text in codecs.iterdecode(pieces, encoding))
    try:
        first = next(pieces, b"")
        if first.startswith(b"%PDF-") or _n_controls(start := first[:512]) > 0.01 * len(
            start
        ):  # tar: a name and zeros
            raise Unreadable(BINARY)
        yield first
        yield from pieces
    except UnicodeDecodeError:
        raise Unreadable(f"invalid {encoding}") from None


def _n_controls(content: bytes) -> int:
    """Return how many control characters that no text has are in it: random bytes have 10 %."""
    return len(content) - len(content.translate(None, _CONTROLS))


def _content(path: Path, seen: Seen) -> Iterator[bytes]:
    raw, suffix = partial(_bytes, path, seen), path.suffix.lower()
    if suffix == ".zst":
        from zstandard import ZstdDecompressor, ZstdError

        return _decompressed(
            raw(_PACKED_BYTES), lambda: ZstdDecompressor().decompressobj(), ZstdError
        )
    if suffix == ".gz":
        return _decompressed(
            raw(_PACKED_BYTES), lambda: zlib.decompressobj(wbits=31), zlib.error, padded=True
        )
    if suffix == ".bz2":
        import bz2  # not in every Python

        return _decompressed(raw(_PACKED_BYTES // 64), bz2.BZ2Decompressor, OSError)
    if suffix == ".xz":
        import lzma  # not in every Python

        return _decompressed(raw(_PACKED_BYTES), lzma.LZMADecompressor, lzma.LZMAError)
    return raw(_READ_BYTES)


def _bytes(path: Path, seen: Seen, n_bytes: int) -> Iterator[bytes]:
    """Yield what stands in a file in pieces of `n_bytes`."""
    with open_file(path.resolve()) as file:  # a data file may be a link
        while chunk := file.read(n_bytes):
            seen(len(chunk))
            yield chunk


def _decompressed(
    raw: Iterator[bytes],
    new_frame: Callable[[], Any],
    broken: type[Exception],
    padded: bool = False,
) -> Iterator[bytes]:
    """Decompress an archive, which may hold several frames (.zst), members (.gz) or streams (.bz2, .xz) in a row.

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
                raise Unreadable(
                    LONG_WINDOW if "too much memory" in str(error) else "corrupted archive"
                ) from None
            for start in range(0, len(content), _PIECE_BYTES):
                yield content[start : start + _PIECE_BYTES]
            chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise Unreadable("truncated archive")
