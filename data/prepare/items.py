"""The items that a source yields, and the documents that they become."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from data.tokenizers.chat import NO_ROLE


class Position(NamedTuple):
    """A place in a source. Items after it are in a later input or have a higher number."""

    input: str
    """A name in `Source.inputs`: a file, a dataset."""
    number: int
    """The number of the line or document in that input, from 1."""

    def __str__(self) -> str:
        return f"{self.input}:{self.number}"


class Unreadable(Exception):
    """This item is not a document. The reason, such as "malformed JSON", is counted."""

    def __init__(self, reason: str, line: int = 1, about: str = "") -> None:
        """`line`: where in the rest of the input it is. `about`: what it has instead."""
        super().__init__(reason)
        self.line = line
        self.about = about


NO_TEXT = "missing text"
"""The reason for a document without its text_field."""
NO_CONVERSATION = "no conversation"
NOT_JSON = "malformed JSON"
OTHER_JSON = "JSON without the text_field"
NOT_UTF8 = "invalid UTF-8"
BINARY = "binary data"
ARRAY = "JSON array"
NO_HEADER = "ids without a header"
OUT_OF_RANGE = "id out of range"
LONG_LINE = "line too long"
LONG_WINDOW = "archive whose window is above 128 MB"
REMEDIES = {
    NO_TEXT: "give the key that holds their text",
    NO_CONVERSATION: 'give data.text_field=KEY of its messages, or write {"messages": [{"role": '
    '"user", "content": "Hello"}, ...]}, {"conversations": [{"from": "human", "value": "Hello"}, '
    '...]}, or {"instruction": "Say hello", "input": "", "output": "Hello"}',
    NOT_JSON: "write one JSON object a line, or read plain text with data=text, CSV with data=hf",
    OTHER_JSON: "give the key of their text as data.text_field, or leave them out",
    NOT_UTF8: "convert it with iconv -f ENCODING -t utf-8, where ENCODING is the one it was "
    "written in, such as cp1252 or utf-16",
    BINARY: "unpack archives, extract the text of PDF files, convert UTF-16 with iconv -f utf-16 "
    "-t utf-8, read Parquet with data=hf and token ids with data=tokens",
    NO_ROLE: 'write each as {"role": "user", "content": "Hello"}',
    ARRAY: "write one object a line, or use data=hf data.path=FILE data.text_field=KEY",
    NO_HEADER: "give their type, such as data.dtype=uint16 for nanoGPT's",
    OUT_OF_RANGE: "give the tokenizer and the data.dtype that made the ids, or tokenizer=ids",
    LONG_LINE: "write one object a line, as jq -c '.[]' does",
    LONG_WINDOW: "decompress it with zstd -d --long=31, or xz -d",
}


class Raw(NamedTuple):
    """An item as it was read, before the source's `parse`."""

    position: Position
    content: Any
    """Bytes, text or other plain data, which goes to a worker process.

    Unreadable if it could not even be read.
    """
    size: int
    """About the number of its characters."""


class Document(NamedTuple):
    """A document, not empty, and the set that counts it."""

    content: str | np.ndarray | list[tuple[str, str]]
    """A text, the ids of one that were made elsewhere, or a conversation."""
    set_name: str
    unread: tuple[str, ...] = ()
    """Keys of a conversation that say more than is read, such as "tools", once each."""


CountBytes = Callable[[int], object]
"""Called with the number of bytes of the input that were read since the last call."""
