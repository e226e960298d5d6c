"""Where documents come from: a source is its settings, and `documents()` yields raw items in a fixed order.

What a raw item says is found by the source's `parse`, which runs in a worker process.
To add one: a class here with its `name`, its place in `SourceConfig`, and a YAML in configs/data.
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
    """A bytearray is UTF-8: of a text so long that a str would take too much memory."""
    set_name: str


class Unreadable(NamedTuple):
    """Something that should have been a document: why it is not, and where it is."""

    reason: Reason
    where: str


class Position(NamedTuple):
    """A place in a source: what comes after it is an item of a later input, or one with a higher number."""

    input: str
    """A name that `Source.inputs` has: a file, a dataset."""
    number: int
    """Of the line or document in that input, from 1."""


class Raw(NamedTuple):
    """An item as it was read: its place, and what the source's `parse` makes a document of."""

    position: Position
    content: Any
    """Bytes or text, plain data in any case: it goes to a worker process. Unreadable: what could not even be read."""
    size: int
    """About how many characters it holds."""


Seen = Callable[[int], object]  # is told how many more bytes of the input have been read


def _nobody(_: int) -> None:
    """Nobody wants to know."""


class Source(Settings):
    """Where documents come from."""

    usual_val_fraction: ClassVar[float]

    def inputs(self) -> dict[str, int | None]:
        """Names of what is read, in the order in which it is read, with sizes in bytes. None: not known before."""
        raise NotImplementedError

    def size(self) -> int | None:
        """Bytes of the input. None: not known before it has been read."""
        sizes = self.inputs().values()
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def documents(self, seen: Seen = _nobody, after: Position | None = None) -> Iterator[Raw]:
        """All items in a fixed order, or those after a position. What can't be read is an item too."""
        raise NotImplementedError

    def parse(self, raw: Raw) -> Document | Unreadable:
        """What an item of `documents` says."""
        raise NotImplementedError


class FileSource(Source):
    """A source that reads files, one after the other."""

    def paths(self) -> dict[str, Path]:
        """The files by the names that positions give them, in order."""
        raise NotImplementedError

    def read(self, name: str, path: Path, seen: Seen) -> Iterator[Raw]:
        """The items of one file, numbered upwards."""
        raise NotImplementedError

    def inputs(self) -> dict[str, int | None]:
        """The files and their sizes."""
        return {name: path.stat().st_size if path.exists() else 0 for name, path in self.paths().items()}

    def documents(self, seen: Seen = _nobody, after: Position | None = None) -> Iterator[Raw]:
        """Read the files in order. Those before the position's are not opened, its own is read from the beginning."""
        paths = self.paths()
        if after and after.input not in paths:
            raise UserError(f"{after.input} is not among the input files any more: bring it back, or begin anew")
        ahead = after is not None
        for name, path in paths.items():
            if not (after and ahead):
                yield from self.read(name, path, seen)
            elif name != after.input:
                seen(path.stat().st_size if path.exists() else 0)
            else:
                ahead = False
                yield from (raw for raw in self.read(name, path, seen) if raw.position.number > after.number)


class StdlibSource(FileSource):
    """The Python sources of the interpreter's own standard library: real text that every machine has."""

    usual_val_fraction: ClassVar[float] = 0.05

    name: Literal["stdlib"]

    def paths(self) -> dict[str, Path]:
        """Files by their path in the library. Tests and installed packages stay out: not every machine has them."""
        root = Path(sysconfig.get_path("stdlib"))
        excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        names = [path.relative_to(root) for path in root.rglob("*.py")]
        return {str(name): root / name for name in sorted(names) if not excluded.intersection(name.parts)}

    def read(self, name: str, path: Path, seen: Seen) -> Iterator[Raw]:
        """A file is one document."""
        try:
            text = "".join(_text(path, seen))
            yield Raw(Position(name, 1), text, len(text))
        except OSError:
            yield _missing("unreadable file", name, 1)
        except UnicodeDecodeError:
            yield _missing("invalid UTF-8", name, 1)

    def parse(self, raw: Raw) -> Document | Unreadable:
        """The text of the file."""
        return _document(raw.content, "stdlib", raw.position.input)


class TextSource(FileSource):
    """Text files in UTF-8."""

    usual_val_fraction: ClassVar[float] = 0.05

    name: Literal["text"]
    path: str | list[str]
    """A file, a glob (`**` reaches into folders), or a list of them."""

    def paths(self) -> dict[str, Path]:
        """The files that `path` names."""
        return _files(self.path)

    def read(self, name: str, path: Path, seen: Seen) -> Iterator[Raw]:
        """A file is one document; a long one is cut into several, so that the split by hash has something to choose."""
        number = 0
        try:
            for _ in _text(path):  # a file with an error in it is refused as a whole
                pass
            for number, passage in enumerate(passages(_text(path, seen)), start=1):
                yield Raw(Position(name, number), passage, len(passage))
        except OSError:
            yield _missing("unreadable file", name, number + 1)
        except UnicodeDecodeError:
            yield _missing("invalid UTF-8", name, number + 1)

    def parse(self, raw: Raw) -> Document | Unreadable:
        """The text of a file or of a piece of it."""
        return _document(raw.content, "text", raw.position.input)


class JsonlSource(FileSource):
    """JSON lines, one object a document: .jsonl, .jsonl.gz or .jsonl.zst, such as the Pile's files."""

    usual_val_fraction: ClassVar[float] = 0.005

    name: Literal["jsonl"]
    path: str | list[str]
    """A file, a glob (`**` reaches into folders), or a list of them."""
    text_field: str = "text"
    """The key that holds the text. The set is `meta.pile_set_name` where there is one, else `jsonl`."""

    def paths(self) -> dict[str, Path]:
        """The files that `path` names."""
        return _files(self.path)

    def read(self, name: str, path: Path, seen: Seen) -> Iterator[Raw]:
        """The lines of a file; what stands before the damage in a damaged archive is kept."""
        number = 0
        try:
            for number, line in enumerate(read_lines(path, seen), start=1):
                if line is None:
                    yield _missing("line too long", name, number)
                elif line.strip():  # a blank line is not a document
                    yield Raw(Position(name, number), line, len(line))
        except OSError as error:
            if number:  # it was readable: the rest must not be given up for a disk that fails now
                raise UserError(f"{path} can't be read after line {number} ({error.strerror}): try again") from None
            yield _missing("unreadable file", name, 1)
        except DamagedArchive as damage:
            yield _missing(damage.reason, name, number + 1)
        else:
            if number == 0:
                yield _missing("empty file", name, 1)

    def parse(self, raw: Raw) -> Document | Unreadable:
        """The text of a line."""
        where = f"{raw.position.input}:{raw.position.number}"
        try:
            record = parse_line(raw.content, self.text_field)
        except NotRead as error:
            return Unreadable(error.fault, where)
        return _record(record, self.text_field, "jsonl", where)


class PileSource(Source):
    """A Hugging Face dataset, streamed: the Pile, or any other with a text column."""

    usual_val_fraction: ClassVar[float] = 0.005

    name: Literal["pile"]
    path: str = "monology/pile-uncopyrighted"
    """A dataset on the hub, or a builder such as `json` together with data_files."""
    revision: str | None = None
    """A commit or tag of the dataset; null: the newest."""
    data_files: str | list[str] | None = None
    """Only these files, in the hub's dataset or, for a builder, here; null: all."""
    text_field: str = "text"
    """The column that holds the text. The set is `meta.pile_set_name` where there is one, else `pile`."""

    def inputs(self) -> dict[str, int | None]:
        """The dataset, as one input."""
        return {self.path: None}

    def documents(self, seen: Seen = _nobody, after: Position | None = None) -> Iterator[Raw]:
        """Stream the training split. A broken connection is opened again at the row where it broke.

        After a position, rows up to it are read again and passed over: a stream can't be entered in the middle.

        Raises:
            UserError: there is no such dataset, it can't be reached any more, or its files are not in order.
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
        """The text of a row."""
        text, meta = raw.content
        where = f"{raw.position.input} row {raw.position.number}"
        return _record({self.text_field: text, "meta": meta}, self.text_field, "pile", where)

    def _open(self, first: int, state: Any) -> Any:
        """The rows after the first so many, or after the state of an earlier stream of these."""
        from datasets import load_dataset
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # it would announce each of its retries, some 20 seconds long
        settings = {"revision": self.revision, "data_files": self.data_files}
        rows = load_dataset(self.path, **settings, split="train", streaming=True).skip(first)
        if state is not None:
            rows.load_state_dict(state)
        return rows


def _is_of_the_network(error: Exception) -> bool:
    """Whether trying again may help. The clients of HTTP have errors of their own that are no OSError."""
    return isinstance(error, OSError) or type(error).__module__.split(".")[0] in _HTTP_CLIENTS


SourceConfig = Annotated[StdlibSource | TextSource | JsonlSource | PileSource, Field(discriminator="name")]
SOURCES = {get_args(cls.model_fields["name"].annotation)[0]: cls for cls in get_args(get_args(SourceConfig)[0])}

_ADVICE = "bring its .jsonl.zst files here and use data=jsonl data.path='files/*.jsonl.zst'"
_HTTP_CLIENTS = {"aiohttp", "httpcore", "httpcore2", "httpx", "httpx2"}
_RETRIES = 5
_SECONDS_BEFORE_RETRY = 5.0
_READ_BYTES = 2**20
_PASSAGE = 16_384
_LONGEST_PASSAGE = 2**20
_BLANK_LINES = re.compile(r"(?:\r?\n){2,}")
_LINE_END = re.compile(r"\n")


def passages(chunks: Iterable[str]) -> Iterator[str]:
    """Cut a text that comes in chunks into passages of 16,384 characters or somewhat more; joined, they are the text.

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
    except UnicodeEncodeError:  # JSON's "\ud800" makes half a character, which no UTF-8 can hold
        return Unreadable("lone surrogate", where)
    return Document(text, set_name)


def _record(record: Any, text_field: str, default_set: str, where: str) -> Document | Unreadable:
    if not isinstance(record, dict) or record.get(text_field) is None:
        return Unreadable("missing text", where)
    meta = record.get("meta")
    name = meta.get("pile_set_name") if isinstance(meta, dict) else None
    if not (isinstance(name, str) and name and name.isprintable()):  # it goes to the terminal
        name = default_set
    return _document(record[text_field], name, where)


def _missing(reason: Reason, name: str, number: int) -> Raw:
    where = f"{name}:{number}" if number > 1 else name
    return Raw(Position(name, number), Unreadable(reason, where), 0)


def _files(path: str | list[str]) -> dict[str, Path]:
    """The files that `data.path` names, each once: patterns in the order given, the files of a pattern sorted."""
    found: dict[str, str] = {}  # by what they really are
    for pattern in [path] if isinstance(path, str) else path:
        matches = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        files = [match for match in matches if not os.path.isdir(match)]
        if not files:
            raise UserError(f"data.path={pattern} matches no file: give a file or a glob such as 'folder/**/*.txt'")
        for file in files:
            found.setdefault(os.path.realpath(file), file)
    return {file: Path(file) for file in found.values()}


def _text(path: Path, seen: Seen = _nobody) -> Iterator[str]:
    """A file's text in chunks of bounded size."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        while content := file.read(_READ_BYTES):
            seen(len(content))
            yield decoder.decode(content)
        yield decoder.decode(b"", final=True)
