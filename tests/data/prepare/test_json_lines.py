import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data.prepare.json_lines
from data.prepare.json_lines import NotRead, parse_line

WHOLE = [
    "a",
    "é",
    "日",
    "😀",
    " ",
    "\u2028",
    "\x85",
    "{",
    '\\"',
    "\\\\",
    "\\n",
    "\\/",
    "\\u00e9",
    "\\ud83d\\ude00",
    "\\u0000",
]
BROKEN = ["\\ud83d", "\\udc00", "\\x", "\\u12", "\n", '"', "\\"]
LINES = [
    '{"text": "%"}',
    '{"meta": {}, "text":"%"}\r',
    '{"text": "%", "also": ["%"]}',
    '\ufeff{"text": "%"}',
    '{"text": "%',
]


def outcome(line, text_field="text"):
    """The text as UTF-8, or why there is none."""
    try:
        text = parse_line(line, text_field)[text_field]
        return bytes(text) if isinstance(text, bytearray) else text.encode()
    except NotRead as error:
        return error.fault
    except UnicodeEncodeError:
        return "lone surrogate"


@pytest.fixture
def all_are_long(monkeypatch):
    """Makes every line long, and every string but keys; a piece is some characters."""

    def set_(piece):
        monkeypatch.setattr(data.prepare.json_lines, "LONG", 60)  # more than what stands beside the long strings
        monkeypatch.setattr(data.prepare.json_lines, "_LONG_STRING", len('"text"'))
        monkeypatch.setattr(data.prepare.json_lines, "_PIECE", piece)

    return set_


def long_and_short(line, all_are_long, piece, monkeypatch):
    monkeypatch.undo()
    short = outcome(line)
    all_are_long(piece)
    return outcome(line), short


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.lists(st.sampled_from(WHOLE), min_size=101).map("".join),
    line=st.sampled_from(LINES[:-1]),
    piece=st.integers(12, 20),
)
@pytest.mark.slow
def test_long_lines_say_what_short_ones_say(all_are_long, monkeypatch, text, line, piece):
    long, short = long_and_short(line.replace("%", text).encode(), all_are_long, piece, monkeypatch)
    assert long == short == json.loads(f'"{text}"').encode()


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.lists(st.sampled_from(WHOLE), min_size=101).map("".join),
    wrong=st.sampled_from([*BROKEN, "\udcff"]),
    after=st.lists(st.sampled_from(WHOLE), min_size=1).map("".join),
    line=st.sampled_from(LINES),
    piece=st.integers(12, 20),
)
@pytest.mark.slow
def test_long_lines_are_refused_as_short_ones_are(all_are_long, monkeypatch, before, wrong, after, line, piece):
    content = line.replace("%", before + wrong + after).encode("utf-8", "surrogateescape")
    long, short = long_and_short(content, all_are_long, piece, monkeypatch)
    assert isinstance(long, str) == isinstance(short, str)
    if not isinstance(short, str):  # what was to be wrong has become right by what stands beside it
        assert long == short


@pytest.mark.parametrize("line", [b'{"text": "%"}', b'["%"]', b'"%"', b'{"%": 1, "text": "%"}', b'{"meta": "%"}'])
def test_only_the_text_is_kept_of_a_long_line(line, all_are_long):
    all_are_long(16)
    record = parse_line(line.replace(b"%", b"word " * 50), "text")
    if isinstance(record, dict) and "text" in record:
        assert record["text"] == bytearray(b"word " * 50)
    assert "word" not in str({**record, "text": ""} if isinstance(record, dict) else record)


def test_a_line_that_is_long_without_long_strings(all_are_long):
    all_are_long(16)
    assert outcome(json.dumps({"text": "a", "numbers": [1] * 100}).encode()) == "line too long"


def test_a_broken_line_of_quotes_takes_no_longer_than_others(monkeypatch):
    monkeypatch.setattr(data.prepare.json_lines, "LONG", 2**16)
    assert outcome(b'{"text": "' + rb"\"" * 2**22) == "malformed JSON"
