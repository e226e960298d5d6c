"""Parsing a line of JSON: with orjson, with json where orjson refuses it, and a long line in little memory.

A Python string of 200 MB takes 800 MB if it has one emoji, and the line takes as much again. So the long strings of a
long line are cut out before it is parsed, and only the text among them is converted to UTF-8 bytes, piece by piece.
"""

import itertools
import json
import re
import secrets
from typing import Any, Literal

import orjson

LONG = 2**24
"""A line or text with more characters or bytes is long; shorter ones are parsed whole."""
_LONG_STRING = 2**20
_PIECE = 2**20
_DEEP = 500

# Possessive (*+): without backtracking, a match takes no memory.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_HEX = rb"[0-9a-fA-F]"
_WHOLE_CHARACTERS = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89abAB])H{4}|\\u[dD][89abAB]H{2}\\u[dD][c-fC-F]H{2})*+".replace(b"H", _HEX),
    re.DOTALL,
)

Fault = Literal["invalid UTF-8", "line too long", "lone surrogate", "malformed JSON"]


class NotRead(Exception):
    """A line that cannot be parsed."""

    def __init__(self, fault: Fault) -> None:
        self.fault: Fault = fault


def parse_line(line: bytes | bytearray, text_field: str) -> Any:
    """Return the JSON value of a line. In a long line, `text_field` may be a bytearray of UTF-8; other long strings are
    replaced.

    Raises:
        NotRead: the line is not JSON, not UTF-8 or too long.
    """
    if len(line) > LONG:
        return _parse_long(line, text_field)
    try:
        return orjson.loads(line)
    except ValueError:  # json accepts more (a byte order mark, NaN, half characters), and names the reason
        return _parse(line)


def _parse(line: bytes | bytearray) -> Any:
    if max(line.count(b"["), line.count(b"{")) > _DEEP and _depth(line) > _DEEP:
        raise NotRead("malformed JSON")  # json's own limit depends on the call stack
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise NotRead("invalid UTF-8") from None
    except ValueError:
        raise NotRead("malformed JSON") from None


def _depth(line: bytes | bytearray) -> int:
    """Return how deep brackets are nested."""
    steps = (1 if byte in b"[{" else -1 for byte in _STRING.sub(b"", line) if byte in b"[]{}")
    return max(itertools.accumulate(steps), default=0)


def _parse_long(line: bytes | bytearray, text_field: str) -> Any:
    spans = [match.span() for match in _STRING.finditer(line) if match.end() - match.start() > _LONG_STRING]
    if len(line) - sum(end - start for start, end in spans) > LONG:
        raise NotRead("line too long")
    if spans and (spans[-1][1] - spans[-1][0] < 2 or line[spans[-1][1] - 1] != ord('"')):
        raise NotRead("malformed JSON")
    stand_in = "\0" + secrets.token_hex()  # a string that no line holds
    short, done = bytearray(), 0
    for number, (start, end) in enumerate(spans):
        short += line[done:start] + json.dumps(f"{stand_in} {number}").encode()
        done = end
    record = _parse(short + line[done:])
    text = record.get(text_field) if isinstance(record, dict) else None
    if isinstance(text, str) and text.startswith(stand_in):
        start, end = spans[int(text.split()[-1])]
        record[text_field] = _utf8(line, start + 1, end - 1)
    return record


def _utf8(line: bytes | bytearray, start: int, stop: int) -> bytearray:
    """Return the UTF-8 of the JSON string whose quotes enclose line[start:stop]."""
    utf8 = bytearray()
    while start < stop:
        limit = min(start + _PIECE, stop)
        for _ in range(3):
            if limit < stop and line[limit] & 0xC0 == 0x80:  # inside a character
                limit -= 1
        match = _WHOLE_CHARACTERS.match(line, start, limit)
        if match is None or match.end() == start:
            half = line[start + 1 : start + 2] == b"u" and line[start + 2 : start + 3] in (b"d", b"D")
            raise NotRead("lone surrogate" if half else "malformed JSON")
        text = _parse(b'"' + line[start : match.end()] + b'"')
        try:
            utf8 += text.encode()
        except UnicodeEncodeError:
            raise NotRead("lone surrogate") from None
        start = match.end()
    return utf8
