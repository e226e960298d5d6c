"""Finds the files that a path, a folder or a glob names, and reads them in bounded memory.

Files may be compressed, damaged, or not text. dataset.py decides what becomes of an item that
cannot be read (on_error).
"""

import bz2
import codecs
import fnmatch
import itertools
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import orjson
import zstandard

from common.files import open_file
from data.prepare.items import BINARY, LONG_WINDOW, NOT_JSON, NOT_UTF8, CountBytes, Unreadable

LONGEST_LINE = 2**28
_READ_BYTES = 2**20
# Small, because a hostile archive can unpack to 30,000 times its size.
_PACKED_BYTES = 4_096
# What unpacks a frame of an archive, and the error of a damaged one. xz -9 needs 65 MB.
_FORMATS: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    ".gz": (lambda: zlib.decompressobj(wbits=31), zlib.error),
    ".zst": (lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError),
    ".xz": (lambda: lzma.LZMADecompressor(memlimit=2**27), lzma.LZMAError),
    ".bz2": (bz2.BZ2Decompressor, OSError),
}
COMPRESSED = tuple(_FORMATS)
# Control characters that no text or log has.
_CONTROLS = bytes({*range(32), 127} - {*b"\b\t\n\v\f\r\x1a\x1b"})
_FOLDERS = {  # by names in them
    ("manifest.json", "train-00000.bin"): "a dataset",
    ("config.json", "metrics.jsonl"): "a run",
    ("run.lock",): "a run",
    ("manifest.json", "state.json"): "a checkpoint",
    ("config.json", "model*.safetensors"): "a model",
    ("config.json", "pytorch_model*.bin"): "a model",
    ("dataset_info.json", "state.json"): "saved by datasets: use data=hf",
    ("dataset_dict.json",): "saved by datasets: use data=hf",
    ("multirun.yaml",): "a sweep",
}
_FILES = {  # by the ends of their names
    "tokenizer.json": "a tokenizer",
    ".tiktoken": "a tokenizer",
    ".parquet": "Parquet: use data=hf",
    ".arrow": "Arrow: use data=hf",
    ".csv": "CSV: use data=hf",
    ".tsv": "TSV: write it as CSV or JSON lines",
}
# Files of data, unlike programs, are named for the split that they hold.
_DATA_FILE = r"\.(bin|npy|txt|raw|tokens|jsonl?|ndjson|csv|parquet|arrow)(\.(gz|zst|xz|bz2))?"
VALIDATION = "val|valid|validation|dev"
TEST = "test"


def find_named_files(words: str, paths: Collection[str]) -> list[str]:
    """Return the files named for a split; [] if all files are.

    Examples are val.bin, wiki.val.txt, validation-00000-of-00002.parquet and validation/a.csv.
    """
    number = r"[-_.](part|shard)?[-_.]?\d[^/]*"
    name = re.compile(
        rf"((.*/)?({words})/.*|(.*[^a-z])?({words})({number})?){_DATA_FILE}", re.IGNORECASE
    )
    folder = os.path.commonpath([os.path.abspath(path) for path in paths]) if paths else ""
    named = [path for path in paths if name.fullmatch(os.path.relpath(path, folder))]
    return named if len(named) < len(paths) else []


def find_files(pattern: str, left_out: dict[str, str]) -> list[str]:
    """Return the files that a path, a folder or a glob names, sorted.

    A folder is all its files. A folder that cannot be read is returned itself. As in glob,
    wildcards do not match hidden names. `left_out` gets the path of what is not read, and what it
    is: a dataset, a run, a model, a file that only data=hf reads, or the command's own output.
    """
    if os.path.isfile(pattern):
        paths = iter([pattern])
    elif os.path.isdir(pattern):
        paths = _below(pattern, ["**"], left_out, set())
    else:
        # The folders before the first wildcard.
        folder = os.path.dirname(re.split(r"[*?[]", pattern)[0])
        names = [*filter(None, pattern.removeprefix(folder).split("/"))] or [""]
        paths = _below(folder, names, left_out, set())
    outputs = {os.path.realpath("/dev/fd/1"), os.path.realpath("/dev/fd/2")}
    files = []
    for path in sorted(paths):
        name = re.sub(rf"({'|'.join(COMPRESSED)})$", "", path.lower())
        kind = next((kind for end, kind in _FILES.items() if name.endswith(end)), None)
        if os.path.realpath(path) in outputs:
            kind = "the output of this command"
        if kind is None:
            files.append(path)
        else:
            left_out[path] = kind
    return files


def _kind_of_folder(folder: str, names: list[str]) -> str | None:
    """Return what a folder is that no source of text reads, by names in it; else None."""
    if folder.endswith(".partial"):
        return "a dataset in the making"
    for patterns, kind in _FOLDERS.items():
        if all(fnmatch.filter(names, pattern) for pattern in patterns):
            return kind
    return None


def _below(
    folder: str, patterns: list[str], left_out: dict[str, str], entered: set[tuple[str, int]]
) -> Iterator[str]:
    """Yield what matches a glob in a folder.

    Args:
        patterns: the names between the slashes of the glob.
        entered: real folders that were entered, and how many patterns were left there, as links may
            loop.
    """
    # A link may lead back here: enter each folder once for each rest of the glob.
    place = (os.path.realpath(folder), len(patterns))
    if place in entered:
        return
    entered.add(place)
    pattern, *inner_patterns = patterns
    try:
        names = sorted(os.listdir(folder or "."))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a zero byte
        return
    except OSError:
        yield folder or "."
        return
    # Leave out a dataset, a run or the like as a whole.
    kind = _kind_of_folder(folder, names)
    if kind is not None:
        left_out[folder or "."] = kind
        return
    if pattern == "**" and inner_patterns:  # ** also matches no folder
        yield from _below(folder, inner_patterns, left_out, entered)
    for name in names:
        is_hidden = name.startswith(".") and not pattern.startswith(".")
        if is_hidden or not fnmatch.fnmatchcase(name, pattern):
            continue
        # The last pattern is for files; ** stays for the folders below.
        path = os.path.join(folder, name)
        if not os.path.isdir(path):
            if not inner_patterns:
                yield path
        elif pattern == "**":
            yield from _below(path, patterns, left_out, entered)
        elif inner_patterns:
            yield from _below(path, inner_patterns, left_out, entered)


def list_some(items: list[str]) -> str:
    """Return the first of some items for a message, and how many more there are."""
    n_more = len(items) - 4
    if n_more > 0:
        items = [*items[:4], f"and {n_more} more"]
    return ", ".join(items)


def read_lines(path: Path, count_bytes: CountBytes) -> Iterator[bytes | bytearray | None]:
    r"""Yield the lines of a file that `read_bytes` reads, without b"\n".

    Nothing else ends a line, not U+2028 or "\r". A line of more than LONGEST_LINE bytes is skipped:
    None. Errors are those of `read_bytes`.
    """
    line: bytearray | None = bytearray()  # the next chunk continues it; None: it is too long
    for chunk in read_bytes(path, count_bytes):
        first, *more_lines = chunk.split(b"\n")
        if line is not None:
            line += first
            if len(line) > LONGEST_LINE:
                line = None
        if more_lines:
            yield line
            yield from more_lines[:-1]
            line = bytearray(more_lines[-1])
    if line is None or line:
        yield line


def parse_line(line: bytes | bytearray) -> Any:
    """Return the JSON value of a line. Raises Unreadable."""
    try:
        return orjson.loads(line)
    except ValueError:
        pass
    try:  # json accepts more: a byte order mark, NaN, half characters
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise Unreadable(NOT_UTF8) from None
    except (ValueError, RecursionError):
        raise Unreadable(NOT_JSON) from None


def read_text(path: Path, count_bytes: CountBytes) -> Iterator[str]:
    """Yield the text of a file in chunks of bounded size.

    Raises:
        OSError: the file cannot be read.
        Unreadable: as `read_bytes`, or with the line that is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    try:
        for content in read_bytes(path, count_bytes):
            text = decoder.decode(content)
            yield text
            line += text.count("\n")
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        reason = BINARY if _n_controls(error.object) else NOT_UTF8
        raise Unreadable(reason, line + error.object.count(b"\n", 0, error.start)) from None


def read_bytes(path: Path, count_bytes: CountBytes) -> Iterator[bytes]:
    """Yield the content of a file in chunks of bounded size, decompressed as its suffix says.

    A byte order mark of UTF-8 is left out.

    Raises:
        OSError: the file cannot be read.
        Unreadable: its beginning is not text, or the archive is damaged, after its whole chunks.
    """
    suffix = path.suffix.lower()
    is_packed = suffix in _FORMATS
    chunks = _file_chunks(path, count_bytes, _PACKED_BYTES if is_packed else _READ_BYTES)
    if is_packed:
        chunks = _decompressed(chunks, *_FORMATS[suffix])
    first = next(chunks, b"").removeprefix(codecs.BOM_UTF8)
    start = first[:512]
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        raise Unreadable(NOT_UTF8)
    if first.startswith(b"%PDF-") or _n_controls(start) > 0.01 * len(start):  # tar has zeros
        raise Unreadable(BINARY)
    yield from itertools.chain([first], chunks)


def _n_controls(content: bytes) -> int:
    """Count the control characters that no text has: random bytes have 10 %."""
    return len(content) - len(content.translate(None, _CONTROLS))


def _file_chunks(path: Path, count_bytes: CountBytes, n_bytes: int) -> Iterator[bytes]:
    with open_file(path.resolve()) as file:  # a data file may be a link
        while chunk := file.read(n_bytes):
            count_bytes(len(chunk))
            yield chunk


def _decompressed(
    chunks: Iterator[bytes], new_frame: Callable[[], Any], broken: type[Exception]
) -> Iterator[bytes]:
    """Decompress an archive.

    It may hold several frames or streams in a row.
    """
    frame = None
    for chunk in chunks:
        while chunk:
            if frame is None:
                frame = new_frame()
            try:
                content = frame.decompress(chunk)
            except broken as error:
                is_long = re.search("too much memory|usage limit", str(error))
                raise Unreadable(LONG_WINDOW if is_long else "corrupted archive") from None
            if content:  # the first chunk of a file tells whether it is text
                yield content
            chunk = b""
            if frame.eof:
                chunk = frame.unused_data
                frame = None
    if frame is not None:
        raise Unreadable("truncated archive")
