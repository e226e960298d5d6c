"""Where documents come from: a source is its settings, and `documents()` yields raw items in a fixed order.

The source's `parse` turns a raw item into a document; it runs in a worker process.
To add a source: a class here with its `name`, its place in `SourceConfig`, and a YAML in configs/data.
"""

import codecs
import glob
import os
import re
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import Field

from common.console import warn
from common.settings import Settings, UserError
from data.prepare.archives import DamagedArchive, read_lines
from data.prepare.json_lines import NotRead, parse_line

Reason = Literal[
    "cannot be tokenized",
    "corrupted archive",
    "empty document",
    "empty file",
    "invalid UTF-8",
    "line too long",
    "lone surrogate",
    "malformed JSON",
    "missing text",
    "text is not a string",
    "truncated archive",
    "unreadable file",
]


class Document(NamedTuple):
    """One text and the named set it is counted under. The text is not empty and has a UTF-8 form."""

    text: str | bytearray
    """A bytearray is UTF-8, for a text so long that a str would take too much memory."""
    set_name: str


class Unreadable(NamedTuple):
    """An item that is no document: why, and where it is."""

    reason: Reason
    where: str


class Position(NamedTuple):
    """A place in a source. Items after it are in a later input or have a higher number."""

    input: str
    """A name in `Source.inputs`: a file, a dataset."""
    number: int
    """The number of the line or document in that input, from 1."""


class Raw(NamedTuple):
    """An item as it was read, before the source's `parse`."""

    position: Position
    content: Any
    """Bytes, text or other plain data, which goes to a worker process; Unreadable if it could not even be read."""
    size: int
    """About the number of its characters."""


Seen = Callable[[int], object]  # called with the number of bytes of the input read since the last call


def _nobody(_: int) -> None:
    """Do nothing."""


class Source(Settings):
    """Where documents come from."""

    usual_val_fraction: ClassVar[float]

    def inputs(self) -> dict[str, int | None]:
        """Return the names of all inputs in reading order, with their sizes in bytes; None if a size is not known."""
        raise NotImplementedError

    def size(self) -> int | None:
        """Return the bytes of the whole input, None if they are not known."""
        sizes = self.inputs().values()
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def documents(self, seen: Seen = _nobody, after: Position | None = None) -> Iterator[Raw]:
        """Yield all items in a fixed order, or those after a position. What cannot be read is an item too."""
        raise NotImplementedError

    def parse(self, raw: Raw) -> Document | Unreadable:
        """Turn an item of `documents` into a document."""
        raise NotImplementedError


class FileSource(Source):
    """A source that reads files, one after the other."""

    _task: tuple[int, int] = (0, 1)  # the number of this task and of all tasks

    def paths(self) -> dict[str, Path]:
        """Return all files by the names that positions give them, in order."""
        raise NotImplementedError

    def read(self, name: str, path: Path, seen: Seen) -> Iterator[Raw]:
        """Yield the items of one file, with increasing numbers."""
        raise NotImplementedError

    def share(self, task_index: int, num_tasks: int) -> "FileSource":
        """Return a source of one task's files. The shares of all tasks, in order, are the whole source."""
        source = self.model_copy()
        source._task = task_index, num_tasks
        return source

    def inputs(self) -> dict[str, int | None]:
        """Return the files of this share and their sizes."""
        return {name: _size(path) for name, path in self._paths()}

    def documents(self, seen: Seen = _nobody, after: Position | None = None) -> Iterator[Raw]:
        """Read the files in order. Files before the position's are not opened, its own is read from the beginning."""
        paths = self._paths()
        names = [name for name, _ in paths]
        if after and after.input not in names:
            raise UserError(f"{after.input} is not among the input files any more: restore it, or start again")
        current = names.index(after.input) if after else -1
        for number, (name, path) in enumerate(paths):
            if number < current:
                seen(_size(path))
            elif after and number == current:
                yield from (raw for raw in self.read(name, path, seen) if raw.position.number > after.number)
            else:
                yield from self.read(name, path, seen)

    def _paths(self) -> list[tuple[str, Path]]:
        files, (task_index, num_tasks) = list(self.paths().items()), self._task
        return files[task_index * len(files) // num_tasks : (task_index + 1) * len(files) // num_tasks]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class StdlibSource(FileSource):
    """The Python sources of the interpreter's own standard library: real text that every machine has."""

    usual_val_fraction: ClassVar[float] = 0.05

    name: Literal["stdlib"]

    def paths(self) -> dict[str, Path]:
        """Return the files by their path in the library, without tests and packages, which not every machine has."""
        root = Path(sysconfig.get_path("stdlib"))
        excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        names = [path.relative_to(root) for path in root.rglob("*.py")]
        return {str(name): root / name for name in sorted(names) if not excluded.intersection(name.parts)}

    def read(self, name: str, path: Path, seen: Seen) -> Iterator[Raw]:
        """Yield the file as one document."""
        try:
            text = "".join(_text(path, seen))
            yield Raw(Position(name, 1), text, len(text))
        except OSError:
            yield _missing("unreadable file", name, 1)
        except UnicodeDecodeError:
            yield _missing("invalid UTF-8", name, 1)

    def parse(self, raw: Raw) -> Document | Unreadable:
        """Return the document."""
        return _document(raw.content, "stdlib", raw.position.input)


class TextSource(FileSource, defaults="data/text"):
    """Text files in UTF-8."""

    usual_val_fraction: ClassVar[float] = 0.05

    name: Literal["text"]
    path: str | list[str]
    """A file, a glob (`**` reaches into folders), or a list of them."""

    def paths(self) -> dict[str, Path]:
        """Return the files that `path` names."""
        return _files(self.path)

    def read(self, name: str, path: Path, seen: Seen) -> Iterator[Raw]:
        """Yield the file as one document, or a long one as several, so that the split by hash has a choice."""
        number = 0
        try:
            for _ in _text(path):  # a file with an error is refused as a whole
                pass
            for number, passage in enumerate(passages(_text(path, seen)), start=1):
                yield Raw(Position(name, number), passage, len(passage))
        except OSError:
            yield _missing("unreadable file", name, number + 1)
        except UnicodeDecodeError:
            yield _missing("invalid UTF-8", name, number + 1)

    def parse(self, raw: Raw) -> Document | Unreadable:
        """Return the document."""
        return _document(raw.content, "text", raw.position.input)


class JsonlSource(FileSource, defaults="data/jsonl"):
    """JSON lines, one object a document: .jsonl, .jsonl.gz or .jsonl.zst, such as the Pile's files."""

    usual_val_fraction: ClassVar[float] = 0.005

    name: Literal["jsonl"]
    path: str | list[str]
    """A file, a glob (`**` reaches into folders), or a list of them."""
    text_field: str
    """The key that holds the text. The set is `meta.pile_set_name` where there is one, else `jsonl`."""

    def paths(self) -> dict[str, Path]:
        """Return the files that `path` names."""
        return _files(self.path)

    def read(self, name: str, path: Path, seen: Seen) -> Iterator[Raw]:
        """Yield the lines of a file; of a damaged archive, those before the damage."""
        number = 0
        try:
            for number, line in enumerate(read_lines(path, seen), start=1):
                if line is None:
                    yield _missing("line too long", name, number)
                elif line.strip():  # a blank line is not a document
                    yield Raw(Position(name, number), line, len(line))
        except OSError as error:
            if number:  # the file is readable: a failing disk must not cost the rest of it
                raise UserError(f"{path} can't be read after line {number} ({error.strerror}): try again") from None
            yield _missing("unreadable file", name, 1)
        except DamagedArchive as damage:
            yield _missing(damage.reason, name, number + 1)
        else:
            if number == 0:
                yield _missing("empty file", name, 1)

    def parse(self, raw: Raw) -> Document | Unreadable:
        """Return the document."""
        where = f"{raw.position.input}:{raw.position.number}"
        try:
            record = parse_line(raw.content, self.text_field)
        except NotRead as error:
            return Unreadable(error.fault, where)
        return _record(record, self.text_field, "jsonl", where)


class PileSource(Source, defaults="data/pile"):
    """A Hugging Face dataset, streamed: the Pile, or any other with a text column."""

    usual_val_fraction: ClassVar[float] = 0.005

    name: Literal["pile"]
    path: str
    """A dataset on the hub, or a builder such as `json` together with data_files."""
    revision: str | None
    """A commit or tag of the dataset; null: the newest."""
    data_files: str | list[str] | None
    """Only these files, in the hub's dataset or, for a builder, here; null: all."""
    text_field: str
    """The column that holds the text. The set is `meta.pile_set_name` where there is one, else `pile`."""

    def inputs(self) -> dict[str, int | None]:
        """Return the dataset as one input."""
        return {self.path: None}

    def documents(self, seen: Seen = _nobody, after: Position | None = None) -> Iterator[Raw]:
        """Stream the training split. After a network error it reconnects and goes on at the same row.

        After a position, the rows up to it are re-read and skipped: a stream cannot be entered in the middle.

        Raises:
            UserError: the dataset does not exist, cannot be reached, or has broken files.
        """
        from datasets.exceptions import DatasetsError

        first = number = after.number if after else 0
        rows, state, failures = None, None, 0
        while True:
            try:
                rows = self._open(first, state)
                for row in rows:
                    number, failures = number + 1, 0
                    content = row.get(self.text_field), row.get("meta")
                    size = len(content[0]) if isinstance(content[0], str) else 0
                    yield Raw(Position(self.path, number), content, size)
                return
            except FileNotFoundError as error:
                raise UserError(f"data.path={self.path} data.data_files={self.data_files}: {error}") from None
            except (ValueError, DatasetsError) as error:
                raise UserError(
                    f"data.path={self.path} cannot be read at row {number + 1} ({error}): {_ADVICE}"
                ) from None
            except Exception as error:
                if not _is_of_the_network(error):
                    raise
                failures += 1
                if rows is None or failures > _RETRIES:
                    raise UserError(
                        f"data.path={self.path} cannot be reached ({error}): check the network, or {_ADVICE}"
                    ) from None
                warn(f"reading {self.path} failed at row {number + 1} ({error}): trying again")
                time.sleep(_SECONDS_BEFORE_RETRY * failures)
                state = rows.state_dict()

    def parse(self, raw: Raw) -> Document | Unreadable:
        """Return the document."""
        text, meta = raw.content
        where = f"{raw.position.input} row {raw.position.number}"
        return _record({self.text_field: text, "meta": meta}, self.text_field, "pile", where)

    def _open(self, first: int, state: Any) -> Any:
        """Open the stream after its first rows, or where an earlier stream was."""
        from datasets import load_dataset
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # else it announces each of its retries for some 20 seconds
        settings = {"revision": self.revision, "data_files": self.data_files}
        rows = load_dataset(self.path, **settings, split="train", streaming=True).skip(first)
        if state is not None:
            rows.load_state_dict(state)
        return rows


def _is_of_the_network(error: Exception) -> bool:
    """Return whether retrying may help. HTTP clients have errors of their own that are no OSError."""
    return isinstance(error, OSError) or type(error).__module__.split(".")[0] in _HTTP_CLIENTS


SourceConfig = Annotated[StdlibSource | TextSource | JsonlSource | PileSource, Field(discriminator="name")]
SOURCES = {get_args(cls.model_fields["name"].annotation)[0]: cls for cls in get_args(get_args(SourceConfig)[0])}

_ADVICE = "copy its .jsonl.zst files to this machine and use data=jsonl data.path='files/*.jsonl.zst'"
_HTTP_CLIENTS = {"aiohttp", "httpcore", "httpcore2", "httpx", "httpx2"}
_RETRIES = 5
_SECONDS_BEFORE_RETRY = 5.0
_READ_BYTES = 2**20
_PASSAGE = 16_384
_LONGEST_PASSAGE = 2**20
_BLANK_LINES = re.compile(r"(?:\r?\n){2,}")
_LINE_END = re.compile(r"\n")


def passages(chunks: Iterable[str]) -> Iterator[str]:
    """Cut a text that comes in chunks into passages of 16,384 characters or a bit more; joined, they are the text.

    Cuts are made after blank lines, or after a line where 16,384 more characters hold no blank line, or in a line of a
    million characters. An empty text is one empty passage.
    """
    rest, start = "", 0
    for chunk in chunks:
        rest, start = rest[start:] + chunk, 0
        while len(rest) - start > _LONGEST_PASSAGE:
            stop = _end_of_passage(rest, start)
            yield rest[start:stop]
            start = stop
    while len(rest) - start > 2 * _PASSAGE and (stop := _end_of_passage(rest, start)) < len(rest):
        yield rest[start:stop]
        start = stop
    yield rest[start:]


def _end_of_passage(text: str, start: int) -> int:
    near, far, end = start + _PASSAGE, start + 2 * _PASSAGE, min(start + _LONGEST_PASSAGE, len(text))
    cut = _BLANK_LINES.search(text, near, far) or _LINE_END.search(text, near, end)
    return cut.end() if cut else end


def _document(text: Any, set_name: str, where: str) -> Document | Unreadable:
    if not isinstance(text, str | bytearray):
        return Unreadable("text is not a string", where)
    if not text:
        return Unreadable("empty document", where)
    try:
        if isinstance(text, str):
            text.encode()
    except UnicodeEncodeError:  # JSON's "\ud800" is half a character, which UTF-8 cannot hold
        return Unreadable("lone surrogate", where)
    return Document(text, set_name)


def _record(record: Any, text_field: str, default_set: str, where: str) -> Document | Unreadable:
    if not isinstance(record, dict) or record.get(text_field) is None:
        return Unreadable("missing text", where)
    meta = record.get("meta")
    name = meta.get("pile_set_name") if isinstance(meta, dict) else None
    if not (isinstance(name, str) and name and name.isprintable()):  # it is printed to terminals
        name = default_set
    return _document(record[text_field], name, where)


def _missing(reason: Reason, name: str, number: int) -> Raw:
    where = f"{name}:{number}" if number > 1 else name
    return Raw(Position(name, number), Unreadable(reason, where), 0)


def _files(path: str | list[str]) -> dict[str, Path]:
    """Return each file that `data.path` names once: patterns in the given order, the files of a pattern sorted."""
    found: dict[str, str] = {}  # by their real paths
    for pattern in [path] if isinstance(path, str) else path:
        matches = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        files = [match for match in matches if not os.path.isdir(match)]
        if not files:
            raise UserError(f"data.path={pattern} matches no file: give a file or a glob such as 'folder/**/*.txt'")
        for file in files:
            found.setdefault(os.path.realpath(file), file)
    return {file: Path(file) for file in found.values()}


def _text(path: Path, seen: Seen = _nobody) -> Iterator[str]:
    """Yield the text of a file in chunks of bounded size."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        while content := file.read(_READ_BYTES):
            seen(len(content))
            yield decoder.decode(content)
        yield decoder.decode(b"", final=True)
