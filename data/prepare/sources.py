"""Where documents come from: a source is its settings, and yields raw items in a fixed order.

The source's `parse` turns a raw item into a document; it runs in a worker process. To add a source:
a class here with its `name`, its place in `SourceConfig` (dataset.py), and a YAML in configs/data.
"""

import contextlib
import json
import os
import re
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from common.console import say
from common.settings import JsonDict, PathText, Settings, UserError
from data.prepare.files import (
    COMPRESSED,
    TEST,
    VALIDATION,
    find_files,
    find_named_files,
    list_some,
    parse_line,
    read_bytes,
    read_lines,
    read_text,
)
from data.prepare.items import (
    ARRAY,
    LONG_LINE,
    NO_CONVERSATION,
    NO_TEXT,
    OTHER_JSON,
    CountBytes,
    Document,
    Position,
    Raw,
    Unreadable,
)
from data.tokenizers.chat import parse_message

_DATASET_FILE = re.compile(
    r"\.(parquet|arrow|csv|json)l?((?<=csv)\.(gz|bz2|xz|zst))?$", re.IGNORECASE
)
_PACKED = ("", *COMPRESSED)
JSON_LINES = tuple(kind + packed for kind in (".jsonl", ".ndjson") for packed in _PACKED)
_JSON = tuple(".json" + packed for packed in _PACKED)

Inputs = dict[str, int | None]
"""Names of inputs in reading order, with their sizes in bytes; None: the size is not known."""


class Source(Settings):
    """Where documents come from: inputs, such as files, one after the other."""

    folder: ClassVar[Path] = Path()
    """The folder that names of inputs are relative to."""
    name: str
    """Also the set of a document that does not name its own."""

    @property
    def is_chat(self) -> bool:
        """Whether its documents are conversations, for which the tokenizer needs markers."""
        return False

    def inputs(self) -> Inputs:
        """Return all inputs."""
        raise NotImplementedError

    def val_inputs(self, names: Collection[str]) -> list[str]:
        """Return the inputs, of these, that are for validation; empty: another rule decides."""
        return find_named_files(VALIDATION, names)

    def read(self, path: Path, count_bytes: CountBytes) -> Iterator[Any]:
        """Yield the contents of the numbered items of a file, such as its lines.

        None for a number without an item, such as a blank line. Here the whole text is the only
        item.

        Raises:
            OSError, Unreadable: the file cannot be read any further.
        """
        yield "".join(read_text(path, count_bytes))

    def documents(
        self,
        names: Sequence[str],
        count_bytes: CountBytes = lambda _: None,
        after: Position | None = None,
    ) -> Iterator[Raw]:
        """Yield the items of inputs in order, or those after a position.

        An unreadable item is one too. Files before `after` are not opened. The file of `after` is
        read from its start.
        """
        start = names.index(after.input) if after else 0
        count_bytes(sum(_size(self.folder / name) for name in names[:start]))
        for name in names[start:]:
            last_number = after.number if after and name == after.input else 0
            for raw in self._items(name, count_bytes):
                if raw.position.number > last_number:
                    yield raw

    def _items(self, name: str, count_bytes: CountBytes) -> Iterator[Raw]:
        """Yield the items of one file; of a damaged one, those before the damage."""
        path = self.folder / name
        number = 0
        try:
            if os.path.lexists(path) and not os.path.isfile(path) and not os.path.isdir(path):
                raise Unreadable("not a regular file")
            for number, content in enumerate(self.read(path, count_bytes), start=1):
                if content is not None:
                    yield Raw(Position(name, number), content, _characters_in(content))
            if number == 0:
                raise Unreadable("empty file")
        except Unreadable as error:
            yield Raw(Position(name, number + error.line), error, 0)
        except OSError as error:
            if number:  # the file is readable: a failing disk must not cost the rest of it
                raise UserError(
                    f"{path} can't be read after line {number} ({error.strerror}): try again"
                ) from None
            yield Raw(Position(name, 1), Unreadable("unreadable file"), 0)

    def parse(self, content: Any) -> Document:
        """Turn the content of an item into a document: here a text, or ids. Raises Unreadable."""
        return _check_document(content, self.name)


def _check_document(content: Any, set_name: str) -> Document:
    """Return the document of a text, or of ids; raises Unreadable if it is none."""
    if isinstance(content, Unreadable):
        raise content
    if not isinstance(content, str | np.ndarray):
        raise Unreadable("text is not a string")
    if not len(content):
        raise Unreadable("empty document")
    return Document(content, set_name)


class RecordSource(Source):
    """A source of records: JSON lines, or the rows of a dataset."""

    text_field: str
    """The key of the text, or of the messages of a conversation.

    The set is `meta.pile_set_name` where there is one, else `name`.
    """

    def parse(self, content: Any) -> Document:
        """Return the document in a record, or in a line of JSON. Raises Unreadable."""
        if isinstance(content, str | Unreadable):  # a text beside files of JSON lines
            return super().parse(content)
        record = parse_line(content) if isinstance(content, bytes | bytearray) else content
        fields = record if isinstance(record, dict) else {}
        meta = fields.get("meta")
        set_name = meta.get("pile_set_name") if isinstance(meta, dict) else None
        # Names are printed to terminals.
        if not isinstance(set_name, str) or not set_name.isprintable() or not set_name:
            set_name = self.name
        if not self.is_chat:
            text = fields.get(self.text_field)
            if text is None:
                raise self._lacking(NO_TEXT, fields)
            return _check_document(text, set_name)
        # nanochat writes a conversation as a list.
        messages = record if isinstance(record, list) else _messages(fields, self.text_field)
        if messages is None:
            raise self._lacking(NO_CONVERSATION, fields)
        return Document(_conversation(messages), set_name, _unread_keys(fields, messages))

    def _lacking(self, reason: str, fields: JsonDict) -> Unreadable:
        """Build the error for a record without its text, which names the keys that it has."""
        keys = [repr(key[:40]) for key in fields if key != self.text_field]
        return Unreadable(reason, about=f" with {list_some(keys)}" if keys else "")


def _conversation(messages: list[Any]) -> list[tuple[str, str]]:
    """Return (role, text) of each message of a conversation to learn from. Raises Unreadable."""
    parsed = []
    for message in map(_as_openai, messages):
        try:
            role, text = parse_message(message)
        except UserError as error:
            raise Unreadable(str(error)) from None
        if role == "assistant" and not _is_trained(message):
            role = "untrained"
        parsed.append((role, text))
    if not any(role == "assistant" for role, _ in parsed):
        raise Unreadable("a conversation without an answer to learn")
    if not all(text.strip() for role, text in parsed if role == "assistant"):
        raise Unreadable("an empty answer")
    return parsed


_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
_UNREAD = {"functions", "history", "image", "images", "system_prompt", "tools"}
_UNREAD_OF_MESSAGE = {"name", "reasoning", "reasoning_content", "thinking"}


def _as_openai(message: Any) -> Any:
    """Return a message of ShareGPT as OpenAI writes it, and others as they are."""
    if not isinstance(message, dict) or "from" not in message:
        return message
    role = _SHAREGPT_ROLES.get(str(message["from"]), message["from"])
    return {**message, "role": role, "content": message.get("value")}


def _is_trained(message: JsonDict) -> bool:
    """Whether an answer is a target: "weight" may be 0, "train" or "trainable" false."""
    if message.get("weight") not in (None, 0, 1):
        raise Unreadable("a weight other than 0 and 1")
    return all(message.get(key) in (None, 1) for key in ("weight", "train", "trainable"))


def _unread_keys(record: JsonDict, messages: list[Any]) -> tuple[str, ...]:
    """Return the keys of a record and of its messages that change its meaning and are not read."""
    keys = {key for key in _UNREAD if record.get(key)}
    for message in messages:
        keys |= {key for key in _UNREAD_OF_MESSAGE if message.get(key)}
    return tuple(sorted(keys))


def _characters_in(content: Any) -> int:
    """Return about how many characters an item has."""
    return len(str(content) if isinstance(content, dict | Unreadable) else content)


def _size(path: Path) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else 0


class StdlibSource(Source):
    """The Python sources of the interpreter's standard library: text that every machine has."""

    folder: ClassVar[Path] = Path(sysconfig.get_path("stdlib"))

    name: Literal["stdlib"]

    def inputs(self) -> Inputs:
        """Return the files by their path in the library.

        Tests and packages, which not every machine has, are left out.
        """
        excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        inputs: Inputs = {}
        for path in sorted(path.relative_to(self.folder) for path in self.folder.rglob("*.py")):
            if not excluded.intersection(path.parts):
                inputs[str(path)] = _size(self.folder / path)
        return inputs


class NamedFiles(Source):
    """A source of files that the user names."""

    suffixes: ClassVar[tuple[str, ...]] = ("",)
    """Endings, in lower case, of the names of files that are read from a folder."""

    path: PathText | list[PathText]
    """A file, a folder (its files, without hidden ones), a glob, or a list of them.

    `**` in a glob reaches into folders.
    """

    def inputs(self) -> Inputs:
        """Return the files that `path` names, each once.

        Patterns are in the given order, the files of a pattern sorted. A folder that cannot be read
        is one of them. What is left out is printed.
        """
        paths: dict[str, str] = {}  # by their real paths
        for pattern in [self.path] if isinstance(self.path, str) else self.path:
            left_out: dict[str, str] = {}
            files = find_files(pattern, left_out)
            # A folder has files of other sources, and a test split.
            for file in files if os.path.isdir(pattern) else []:
                if not file.lower().endswith(self.suffixes) and not os.path.isdir(file):
                    left_out[file] = f"not of data={self.name}"
            files = [file for file in files if file not in left_out]
            if not os.path.isfile(pattern):
                left_out |= dict.fromkeys(find_named_files(TEST, files), "test split")
            files = [file for file in files if file not in left_out]
            # Say what is left out, also if that is all.
            listed = _listed(left_out)
            if not files:
                others = f"; left out: {listed}" if listed else ""
                raise UserError(
                    f"data.path={pattern} matches no file that data={self.name} reads{others}: "
                    "give a file, a folder, or a glob such as 'folder/**/*.txt'"
                )
            if listed:
                say(f"left out of data.path={pattern}: {listed}")
            for file in files:
                paths.setdefault(os.path.realpath(file), file)
        inputs: Inputs = {}
        for file in paths.values():
            if re.search("[\udc80-\udcff]", file):  # Python's form of other bytes
                raise UserError(f"the name of {file} is not in UTF-8, as JSON needs: rename it")
            inputs[file] = _size(Path(file))
        return inputs


def _listed(left_out: dict[str, str]) -> str:
    """Return the first of the files of each kind, and how many more there are."""
    of_kind: dict[str, list[str]] = {}
    for path, kind in left_out.items():
        of_kind.setdefault(kind, []).append(path)
    return "; ".join(f"{list_some(paths)} ({kind})" for kind, paths in of_kind.items())


class LineFiles(RecordSource, NamedFiles):
    """Files of JSON lines."""

    def read(self, path: Path, count_bytes: CountBytes) -> Iterator[Any]:
        """Yield the lines of a file of JSON lines; a blank line is not a document."""
        for number, line in enumerate(read_lines(path, count_bytes)):
            if line is None:
                yield Unreadable(LONG_LINE)
                continue
            if number == 0 and not self.is_chat and line[:100].lstrip().startswith(b"["):
                raise Unreadable(ARRAY)
            yield line if line.strip() else None


class TextSource(LineFiles, defaults="data/text"):
    """Text files. Those named as JSON are read as JSON lines."""

    name: Literal["text"]

    def read(self, path: Path, count_bytes: CountBytes) -> Iterator[Any]:
        """Yield the file as one document, or a long one as several, to be split by their hashes."""
        if path.name.lower().endswith((*JSON_LINES, *_JSON)):
            # The first line of a log or of settings has no text.
            try:
                first = parse_line(_first_line(path) or b"[]")
            except Unreadable:
                first = {}
            if isinstance(first, dict) and self.text_field not in first:
                raise self._lacking(OTHER_JSON, first)
            yield from super().read(path, count_bytes)
            return
        for _ in read_text(path, lambda _: None):
            pass  # an error refuses the whole file
        yield from cut_passages(read_text(path, count_bytes))


class JsonlSource(LineFiles, defaults="data/jsonl"):
    """JSON lines, one object a document, such as the Pile's files."""

    suffixes: ClassVar[tuple[str, ...]] = JSON_LINES

    name: Literal["jsonl"]


class ChatSource(LineFiles, defaults="data/chat"):
    """Conversations as JSON lines, or as one JSON array."""

    suffixes: ClassVar[tuple[str, ...]] = (*JSON_LINES, *_JSON)

    name: Literal["chat"]

    @property
    def is_chat(self) -> bool:
        """Always."""
        return True

    def read(self, path: Path, count_bytes: CountBytes) -> Iterator[Any]:
        """Yield the lines of a file, or the items of the array that it is."""
        if not _begins_array(_first_line(path)):
            yield from super().read(path, count_bytes)
            return
        for record in parse_line(b"".join(read_bytes(path, count_bytes))):
            yield json.dumps(record).encode()  # a line, as other files have


def _first_line(path: Path) -> bytes | bytearray | None:
    """Return the first line that is not blank; None: there is none, or it is too long."""
    lines = read_lines(path, lambda _: None)
    return next((line for line in lines if line is None or line.strip()), None)


def _begins_array(line: bytes | bytearray | None) -> bool:
    """Whether a file that begins with this line is one array of conversations.

    A line may also be one conversation, a list of messages, as nanochat writes them.
    """
    if line is None or not line.lstrip().startswith(b"["):
        return False
    try:
        items = parse_line(line)
    except Unreadable:  # it goes on in the next line
        return True
    first = items[0] if items else None
    return not (isinstance(first, dict) and first.keys() & {"role", "from"})


class HubSource(RecordSource, defaults="data/hf"):
    """A Hugging Face dataset, streamed.

    It is one with a file in configs/data, or any other with a text column.
    """

    name: Literal["hf", "fineweb", "fineweb_edu", "openwebtext", "pile"]
    path: PathText
    """A dataset on the hub, or here.

    Here it is a folder with its files or by save_to_disk, a .parquet, .arrow, .csv or .json file, a
    glob of such, or a builder such as `json` together with data_files.
    """
    subset: str | None
    """One of the dataset's configurations; null: the only one, or the default one."""
    split: str | None
    """One of the dataset's splits, all of which is read; null: train."""
    revision: str | None
    """A commit or tag of the dataset; null: the newest."""
    data_files: PathText | list[PathText] | None
    """Only these files, in the hub's dataset or, for a builder, here; null: all."""
    chat: bool
    """Whether the rows are conversations, in a shape that data=chat reads.

    They are in any case if text_field is messages, conversations or completion.
    """

    @property
    def is_chat(self) -> bool:
        """Whether the rows are conversations."""
        return self.chat or self.text_field in ("messages", "conversations", "completion")

    def inputs(self) -> Inputs:
        """Return the files that are here, or a dataset as one input. What is left out is printed.

        Raises:
            UserError: it is a file here that only another source reads, or cannot be opened.
        """
        if not self._is_here:
            return {self.path: None}
        splits = self._files()
        used = splits.pop(self.split or "train")
        if self.split is None:
            used += splits.pop("validation", [])
            splits.setdefault("test", find_named_files(TEST, used))
            used = [file for file in used if file not in splits["test"]]
        left_out = {file: f"{name} split" for name, files in splits.items() for file in files}
        read = {*used, os.path.join(self.path, "README.md")}
        for file in self._given().values():
            if file not in read:
                left_out.setdefault(file, "not of data=hf")
        if left_out:
            say(f"left out of data.path={self.path}: {_listed(left_out)}")
        return {file: _size(Path(file)) for file in used}

    def val_inputs(self, names: Collection[str]) -> list[str]:
        """Return the files of the validation split, unless one split is all that is read."""
        if self.split or not self._is_here:
            return []
        return self._files().get("validation") or super().val_inputs(names)

    @property
    def _is_here(self) -> bool:
        """Whether it is files of this machine. Raises UserError if only other sources read them."""
        folder = Path(self.path)
        if folder.is_dir():
            return not any((folder / name).exists() for name in _SAVED)
        if _DATASET_FILE.search(self.path):
            return True
        if folder.exists() or re.search(r"[*?[]|^-$", self.path):
            raise UserError(
                f"data.path={self.path}: data=hf reads .parquet, .arrow, .csv and .json files "
                "here; give data=text, jsonl or tokens for others"
            )
        return False

    def _files(self) -> dict[str, list[str]]:
        """Return the files of each split, as the library finds them.

        Raises:
            UserError: they cannot be found, or `split` is none of the splits.
        """
        given = self._given()
        files = {}
        with self._explained():
            for split, paths in (self._open().config.data_files or {}).items():
                files[split] = [given.get(os.path.realpath(path), path) for path in paths]
            _check_split(self.split, files)
        return files

    def _given(self) -> dict[str, str]:
        """Return the files here, as `path` names them, by their real paths."""
        other_kinds: dict[str, str] = {}
        paths = [*find_files(self.path, other_kinds), *other_kinds]
        return {os.path.realpath(path): path for path in paths}

    def _open(self) -> Any:
        """Return the library's builder for the dataset."""
        from datasets import load_dataset_builder, logging
        from huggingface_hub.utils import logging as hub_logging

        logging.set_verbosity(logging.CRITICAL)
        hub_logging.set_verbosity_error()  # else it announces each retry for some 20 seconds
        builder = self.path
        files = self.data_files
        suffix = _DATASET_FILE.search(self.path)
        if suffix:
            builder = suffix[1].lower()
            files = self.path
        return load_dataset_builder(builder, self.subset, data_files=files, revision=self.revision)

    def read(self, path: Path, count_bytes: CountBytes) -> Iterator[Any]:
        """Yield the rows of a file, or of a split. Files are read alone: their columns may differ.

        Raises:
            UserError: the dataset, its subset or split does not exist, or it cannot be reached.
        """
        if not self._is_here:
            with self._explained():
                yield from map(self._read_row, self._stream())
            return
        builder = self._open()
        builder.config.data_files = {"train": [os.path.abspath(path)]}
        builder.config.batch_size = 100  # of Parquet: its first row group may be empty
        builder.info.features = None
        try:
            if _size(path):
                yield from map(self._read_row, builder.as_streaming_dataset("train"))
        except MemoryError:
            raise
        except Exception as error:  # of the library, which has many classes
            raise Unreadable("damaged file", about=f" ({error})") from None
        count_bytes(_size(path))

    def _stream(self) -> Any:
        """Open the split. The library itself retries lost connections."""
        if not Path(self.path).is_dir():
            return self._open().as_streaming_dataset(self.split or "train")
        from datasets import DatasetDict, load_from_disk

        saved = load_from_disk(self.path)
        if isinstance(saved, DatasetDict):
            _check_split(self.split, saved)
            saved = saved[self.split or "train"]
        return saved

    def _read_row(self, row: JsonDict) -> JsonDict:
        """Return a row with what is read; other columns are kept by name, to name them."""
        read = row.keys() if self.is_chat else (self.text_field, "meta")
        return {key: row[key] if key in read else None for key in row}

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise the library's errors as UserError."""
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            raise UserError(f"data.path={self.path} cannot be read ({error}): {_ADVICE}") from None


def _check_split(split: str | None, splits: Collection[str]) -> None:
    """Raise ValueError, as the library does, for a split that is not there."""
    if (split or "train") not in splits:
        raise ValueError(f"Bad split: {split or 'train'}. Available splits: {[*splits]}")


_SAVED = ("dataset_dict.json", "state.json")
_ADVICE = (
    "check the network, data.path, data.subset, data.split and data.revision, and repeat the "
    "command: it continues from what is written; or copy the files to this machine and give "
    "data.path=FOLDER, if they are JSON lines with data=jsonl"
)

_PASSAGE = 16_384
_LONGEST_PASSAGE = 2**20
_BLANK_LINES = re.compile(r"(?:\r?\n){2,}")
_LINE_END = re.compile(r"\n")


def cut_passages(chunks: Iterable[str]) -> Iterator[str]:
    """Cut a text that comes in chunks into passages of 16,384 characters or a bit more.

    Joined, they are the text. It cuts after a blank line; if the next 16,384 characters have none,
    after a line; and within a line of a million characters. An empty text is one empty passage.
    """
    text = ""
    for chunk in chunks:
        # These passages end where they would if the text came at once.
        *complete, text = _cut(text + chunk, _LONGEST_PASSAGE)
        yield from complete
    yield from _cut(text, 2 * _PASSAGE)


def _cut(text: str, longest: int) -> list[str]:
    """Cut passages off the beginning of a text, until the last one is not longer than `longest`."""
    passages = []
    start = 0
    while len(text) - start > longest:
        near = start + _PASSAGE
        end = min(start + _LONGEST_PASSAGE, len(text))
        cut = _BLANK_LINES.search(text, near, near + _PASSAGE) or _LINE_END.search(text, near, end)
        stop = cut.end() if cut else end
        if stop == len(text):
            break
        passages.append(text[start:stop])
        start = stop
    return [*passages, text[start:]]


def _messages(record: JsonDict, text_field: str) -> Any:
    """Return the messages of a record; None if it has none of the known shapes.

    The known shapes:
    A list of messages by OpenAI or ShareGPT, under the key `text_field`, messages or conversations.
    A prompt and its completion, which may be lists of messages.
    Alpaca's instruction, input and output.
    """
    system = record.get("system")
    before = []
    if isinstance(system, str) and system:
        before = [{"role": "system", "content": system}]
    for key in (text_field, "messages", "conversations"):
        messages = record.get(key)
        if isinstance(messages, list) and key not in ("completion", "output"):
            return before + messages
    question = record.get("prompt")
    answer = record.get("completion")
    if answer is None:
        question = record.get("instruction")
        answer = record.get("output")
        details = record.get("input")
        if isinstance(question, str) and isinstance(details, str) and details:
            question = f"{question}\n\n{details}" if question else details
    if isinstance(question, str) and isinstance(answer, str):
        question = [{"role": "user", "content": question}]
        answer = [{"role": "assistant", "content": answer}]
    if isinstance(question, list) and isinstance(answer, list):
        return before + question + answer
    return None
