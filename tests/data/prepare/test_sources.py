import bz2
import codecs
import gzip
import json
import lzma
import os
import sysconfig
from collections import namedtuple
from pathlib import Path

import pytest
import zstandard

from common.settings import UserError, decode, variant_names
from data.prepare.items import OTHER_JSON, Document, Position, Unreadable
from data.prepare.sources import JsonlSource, StdlibSource, TextSource, cut_passages


def jsonl(path, **settings):
    return parsed(decode(JsonlSource, {"name": "jsonl", "path": str(path)} | settings))


Refused = namedtuple("Refused", "reason input number")  # an item that is no document, and where it is


def parsed(source, after=None):
    """What a source holds, each item parsed as a worker process does it."""
    items = []
    for raw in source.documents([*source.inputs()], after=after):
        try:
            items.append(source.parse(raw.content))
        except Unreadable as error:
            items.append(Refused(str(error), *raw.position))
    return items


COMPRESS = {".gz": gzip.compress, ".zst": zstandard.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


@pytest.mark.slow
def test_stdlib_has_no_tests_and_no_installed_packages():
    source = StdlibSource(name="stdlib")
    texts = {item.content for item in parsed(source) if isinstance(item, Document)}
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "json" / "decoder.py").read_bytes().decode() in texts
    assert Path(pytest.__file__).read_bytes().decode() not in texts


@pytest.mark.parametrize("suffix", COMPRESS)
def test_archives_of_several_frames(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    compress = COMPRESS[suffix]
    content = b"".join(b'{"text": "%d"}\n' % i for i in range(50_000))
    middle = len(content) // 2 + 3  # inside a line
    path.write_bytes(compress(content[:middle]) + compress(content[middle:]))
    assert [document.content for document in jsonl(path)] == [str(i) for i in range(50_000)]


def test_set_names_and_text_field(tmp_path):
    path = tmp_path / "a.jsonl"
    metas = [{"pile_set_name": "Pile-CC"}, {"pile_set_name": 7}, {"pile_set_name": "\x1b[2J"}, {}, None, "meta"]
    path.write_text("".join(json.dumps({"content": "x", "meta": meta}) + "\n" for meta in metas))
    sets = [document.set_name for document in jsonl(path, text_field="content")]
    assert sets == ["Pile-CC", "jsonl", "jsonl", "jsonl", "jsonl", "jsonl"]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", ["truncated archive", "corrupted archive"])
def test_damaged_archives_keep_what_stands_before(tmp_path, suffix, damage):
    path = tmp_path / f"a{suffix}"
    whole = COMPRESS[suffix](b'{"text": "whole"}\n')
    second = COMPRESS[suffix](b"".join(b'{"text": "%d"}\n' % i for i in range(20_000)))
    path.write_bytes(whole + (second[:-10] if damage == "truncated archive" else b"not an archive"))
    first, *others, last = jsonl(path)
    assert first.content == "whole"
    assert [document.content for document in others] == [str(i) for i in range(len(others))]
    assert (type(last), last.reason) == (Refused, damage)


NOTE = "Some words of a note, ümlaut.\n" * 40
LINES = "".join(json.dumps({"id": i, "text": f"document {i}"}) + "\n" for i in range(3))
ARRAY_OF_THEM = f"[{', '.join(LINES.splitlines())}]"


FORMATS = {  # name: content, and what data=text and data=jsonl make of it: texts, or the reason why there are none
    "bom.txt": (codecs.BOM_UTF8 + NOTE.encode(), [NOTE], "malformed JSON"),
    "marked-16.txt": (NOTE.encode("utf-16"), "invalid UTF-8", "invalid UTF-8"),
    "unmarked.txt": (NOTE.encode("utf-16-le"), "binary data", "binary data"),
    "latin.txt": (NOTE.encode("latin1"), "invalid UTF-8", "invalid UTF-8"),
    "note.txt.gz": (gzip.compress(NOTE.encode()), [NOTE], "malformed JSON"),
    "array.json": (ARRAY_OF_THEM.encode(), "JSON array", "JSON array"),
    "lines.json": (LINES.encode(), LINES, LINES),
    "lines.txt": (codecs.BOM_UTF8 + LINES.encode(), [LINES], LINES),
    "others.json": (b'{"body": 1}\n' * 2, OTHER_JSON, "missing text"),
    "text.pdf": (b"%PDF-1.4\n" + NOTE.encode(), "binary data", "binary data"),
    "squad.json": (f'{{"version": 1, "data": {ARRAY_OF_THEM}}}'.encode(), OTHER_JSON, "missing text"),
    "turns.json": (LINES.replace('"id"', '"turns": [{"text": "a"}], "id"').encode(), LINES, LINES),
    "prose.txt": (
        b'["text"] is a list, {"text": 1} is not.\n',
        ['["text"] is a list, {"text": 1} is not.\n'],
        "JSON array",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("source", [TextSource, JsonlSource])
def test_formats_and_encodings_are_read_or_told_apart(tmp_path, name, source):
    content, *results = FORMATS[name]
    expected = results[source is JsonlSource]
    (tmp_path / name).write_bytes(content)
    items = parsed(decode(source, {"name": variant_names(source)[0], "path": str(tmp_path / name)}))
    if expected is LINES:
        expected = [f"document {i}" for i in range(3)]
    if isinstance(expected, list):
        assert [item.content for item in items] == expected
    else:
        assert {item.reason for item in items} >= {expected}
        assert all(isinstance(item, Refused) for item in items)


def test_a_name_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("text")
    with pytest.raises(UserError, match=r"caf\\udce9.txt is not in UTF-8, as JSON needs: rename it"):
        TextSource(name="text", path=str(tmp_path)).inputs()


def test_a_folder_is_the_files_in_it_and_kinds_mix(tmp_path):
    folder = tmp_path / "a[1]"
    (folder / "deep" / "empty").mkdir(parents=True)
    a = folder / "a.JSONL"
    a.write_text('{"text": "a", "meta": {"pile_set_name": "A"}}\n\n{"body": 1}\n')
    b = folder / "deep" / "b.jsonl.zst"
    b.write_bytes(zstandard.compress(b'{"text": "b"}\n'))
    c = folder / "deep" / "c.md"
    c.write_text("c")
    of_a = [Document("a", "A"), ("missing text", str(a), 3)]
    text = TextSource(name="text", path=str(folder))
    assert parsed(text) == [*of_a, Document("b", "text"), Document("c", "text")]
    assert parsed(text, after=Position(str(b), 1)) == [Document("c", "text")]
    assert jsonl(folder) == [*of_a, Document("b", "jsonl")]
    mixed = TextSource(name="text", path=[str(c), str(a)], text_field="body")
    assert parsed(mixed) == [Document("c", "text"), (OTHER_JSON, str(a), 1)]
    with pytest.raises(UserError, match="empty matches no file that data=jsonl reads: give a file, a"):
        jsonl(folder / "deep" / "empty")


@pytest.mark.parametrize(
    "paragraph", ["word " * 300 + "\n\n", "word " * 300 + "\r\n\r\n", "word " * 300 + "\n", "x" * 999]
)
def test_passages_join_to_the_text(paragraph):
    text = paragraph * 100
    cut = list(cut_passages([text]))
    assert cut == list(cut_passages(text[i : i + 1000] for i in range(0, len(text), 1000)))
    assert "".join(cut) == text
    if "\n" in paragraph:
        assert len(cut) > 5
        assert all(len(piece) >= 16_384 and piece.endswith(paragraph) for piece in cut)
    else:
        assert cut == [text], "there is no place to cut"
