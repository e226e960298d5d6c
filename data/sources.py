"""Where documents come from. A source is its settings and a `documents()` that yields in a fixed order.

To add one: a class here with its `name`, its place in `SourceConfig`, and a YAML in configs/data.
"""

import glob
import json
import os
import re
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import Field

from common.console import warn
from common.settings import Settings, UserError
from data.archives import DamagedArchive, read_lines

Reason = Literal[
    "corrupted archive",
    "empty document",
    "empty file",
    "invalid UTF-8",
    "lone surrogate",
    "malformed JSON",
    "missing text",
    "text is not a string",
    "truncated archive",
    "unreadable file",
]


class Document(NamedTuple):
    """One text and the named set it is counted under. The text is not empty and has a UTF-8 form."""

    text: str
    set_name: str


class Unreadable(NamedTuple):
    """Something that should have been a document: why it is not, and where it is."""

    reason: Reason
    where: str


Documents = Iterator[Document | Unreadable]
Seen = Callable[[int], object]  # is told how many more bytes of the input have been read


def _nobody(_: int) -> None:
    """Nobody wants to know."""


class StdlibSource(Settings):
    """The Python sources of the interpreter's own standard library: real text that every machine has."""

    usual_val_fraction: ClassVar[float] = 0.05

    name: Literal["stdlib"]

    def size(self) -> int:
        """Bytes of the input."""
        return _size(self._paths())

    def documents(self, seen: Seen = _nobody) -> Documents:
        """One document a file, by relative path. Tests and installed packages stay out: not every machine has them."""
        root = Path(sysconfig.get_path("stdlib"))
        for path in self._paths():
            text = _read_text(path, seen)
            yield text if isinstance(text, Unreadable) else _document(text, "stdlib", str(path.relative_to(root)))

    def _paths(self) -> list[Path]:
        root = Path(sysconfig.get_path("stdlib"))
        excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        paths = [path.relative_to(root) for path in root.rglob("*.py")]
        return [root / path for path in sorted(paths) if not excluded.intersection(path.parts)]


class TextSource(Settings):
    """Text files in UTF-8."""

    usual_val_fraction: ClassVar[float] = 0.05

    name: Literal["text"]
    path: str | list[str]
    """A file, a glob (`**` reaches into folders), or a list of them."""

    def size(self) -> int:
        """Bytes of the input."""
        return _size(_files(self.path))

    def documents(self, seen: Seen = _nobody) -> Documents:
        """A file is one document; a long one is cut into several, so that the split by hash has something to choose."""
        for path in _files(self.path):
            text = _read_text(path, seen)
            if isinstance(text, Unreadable):
                yield text
                continue
            for piece in pieces(text):
                yield _document(piece, "text", str(path))


class JsonlSource(Settings):
    """JSON lines, one object a document: .jsonl, .jsonl.gz or .jsonl.zst, such as the Pile's files."""

    usual_val_fraction: ClassVar[float] = 0.005

    name: Literal["jsonl"]
    path: str | list[str]
    """A file, a glob (`**` reaches into folders), or a list of them."""
    text_field: str = "text"
    """The key that holds the text. The set is `meta.pile_set_name` where there is one, else `jsonl`."""

    def size(self) -> int:
        """Bytes of the input."""
        return _size(_files(self.path))

    def documents(self, seen: Seen = _nobody) -> Documents:
        """Stream the files in order; what stands before the damage in a damaged archive is kept."""
        for path in _files(self.path):
            yield from self._documents_of(path, seen)

    def _documents_of(self, path: Path, seen: Seen) -> Documents:
        number = 0
        try:
            for number, line in enumerate(read_lines(path, seen), start=1):
                if line.strip():  # a blank line is not a document
                    yield self._parse(line, f"{path}:{number}")
        except OSError:
            yield Unreadable("unreadable file", str(path))
        except DamagedArchive as damage:
            yield Unreadable(damage.reason, f"{path} after line {number}")
        else:
            if number == 0:
                yield Unreadable("empty file", str(path))

    def _parse(self, line: bytes, where: str) -> Document | Unreadable:
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError:
            return Unreadable("invalid UTF-8", where)
        except (ValueError, RecursionError):  # RecursionError: brackets nested thousands deep
            return Unreadable("malformed JSON", where)
        return _record(record, self.text_field, "jsonl", where)


class PileSource(Settings):
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

    def size(self) -> None:
        """Not known before it has been read."""

    def documents(self, seen: Seen = _nobody) -> Documents:
        """Stream the training split. A broken connection is opened again at the row where it broke.

        Raises:
            UserError: there is no such dataset, or it can't be reached any more.
        """
        rows, number, failures = self._open(), 0, 0
        while True:
            try:
                for row in rows:
                    number, failures = number + 1, 0
                    yield _record(row, self.text_field, "pile", f"{self.path} row {number}")
                return
            except OSError as error:
                failures += 1
                if failures > _RETRIES:
                    raise UserError(self._advice(error)) from None
                warn(f"reading {self.path} failed at row {number + 1} ({error}): trying again")
                time.sleep(_SECONDS_BEFORE_RETRY * failures)
                position = rows.state_dict()
                rows = self._open()
                rows.load_state_dict(position)

    def _open(self) -> Any:
        from datasets import load_dataset
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # it would announce each of its retries
        try:  # retries by itself, for some 20 seconds
            return load_dataset(
                self.path, revision=self.revision, data_files=self.data_files, split="train", streaming=True
            )
        except FileNotFoundError as error:
            raise UserError(f"data.path={self.path} data.data_files={self.data_files}: {error}") from None
        except OSError as error:
            raise UserError(self._advice(error)) from None

    def _advice(self, error: OSError) -> str:
        return (
            f"data.path={self.path} cannot be reached ({error}): check the network, or bring its .jsonl.zst files here "
            "and use data=jsonl data.path='files/*.jsonl.zst'"
        )


SourceConfig = Annotated[StdlibSource | TextSource | JsonlSource | PileSource, Field(discriminator="name")]
SOURCES = {get_args(cls.model_fields["name"].annotation)[0]: cls for cls in get_args(get_args(SourceConfig)[0])}

_RETRIES = 5
_SECONDS_BEFORE_RETRY = 5.0
_PIECE = 16_384
_BLANK_LINES = re.compile(r"(?:\r?\n){2,}")
_LINE_END = re.compile(r"\n")


def pieces(text: str) -> Iterator[str]:
    """Cut a long text into pieces of 16,384 characters or somewhat more that give the text again when joined.

    Cuts are made after blank lines, or after a line where 16,384 more characters hold no blank line.
    """
    start = 0
    while len(text) - start > 2 * _PIECE:
        near, far = start + _PIECE, start + 2 * _PIECE
        cut = _BLANK_LINES.search(text, near, far) or _LINE_END.search(text, near)
        if cut is None or cut.end() == len(text):
            break
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def _document(text: Any, set_name: str, where: str) -> Document | Unreadable:
    if not isinstance(text, str):
        return Unreadable("text is not a string", where)
    if not text:
        return Unreadable("empty document", where)
    try:
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


def _files(path: str | list[str]) -> list[Path]:
    """The files that `data.path` names, each once: patterns in the order given, the files of a pattern sorted."""
    found: dict[str, None] = {}
    for pattern in [path] if isinstance(path, str) else path:
        matches = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        files = [match for match in matches if not os.path.isdir(match)]
        if not files:
            raise UserError(f"data.path={pattern} matches no file: give a file or a glob such as 'folder/**/*.txt'")
        found.update(dict.fromkeys(files))
    return [Path(file) for file in found]


def _size(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.exists())


def _read_text(path: Path, seen: Seen) -> str | Unreadable:
    try:
        content = path.read_bytes()
        seen(len(content))
        return content.decode("utf-8")
    except OSError:
        return Unreadable("unreadable file", str(path))
    except UnicodeDecodeError:
        return Unreadable("invalid UTF-8", str(path))
