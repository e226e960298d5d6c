import gzip
import json
import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import zstandard

import data.prepare.encode
from common.settings import UserError
from data.prepare.encode import Encoded, Skipped, encode_all
from data.prepare.sources import JsonlSource, Source
from data.tokenizers.build import BytesConfig, build_tokenizer, save_tokenizer

ROOT = Path(__file__).resolve().parents[3]

BAD_LINES = {
    b'{"text": "cut': "malformed JSON",
    b"{'text': 1}": "malformed JSON",
    b'{"text": ' + b"1" * 10_000 + b"}": "malformed JSON",
    b'{"other": "x"}': "missing text",
    b'["text"]': "missing text",
    b'{"text": null}': "missing text",
    b'{"text": 7}': "text is not a string",
    b'{"text": ""}': "empty document",
    b'{"text": "\xff"}': "invalid UTF-8",
    b'{"text": "\xed\xa0\x80"}': "invalid UTF-8",
    b'{"text": "\\ud800 half"}': "lone surrogate",
}
GOOD_TEXTS = ["nul \0", "a\u2028b\u0085c", "<|endoftext|>", "crlf\r\n and cr\r", "\ufeffmark", "half \U0001f600"]


@pytest.fixture
def encode(tmp_path, monkeypatch):
    """All batches of a source, as bytes, a few documents each, with ids as lists to compare."""
    monkeypatch.setattr(data.prepare.encode, "_BATCH_CHARACTERS", 50)
    tokenizer_file = tmp_path / "tokenizer.json"
    save_tokenizer(build_tokenizer(BytesConfig(name="bytes")), tokenizer_file)

    def run(source, workers=1, after=None):
        raws = source.documents([*source.inputs()], after=after)
        batches = []
        for batch in encode_all(source, raws, tokenizer_file, workers):
            items = []
            for item in batch:
                if isinstance(item, Encoded):
                    assert item.ids.dtype == np.dtype("<u2")
                    item = item._replace(ids=item.ids.tolist())
                items.append(item)
            batches.append(items)
        return batches

    return run


def jsonl_in(folder):
    return JsonlSource(name="jsonl", path=str(folder / "*.jsonl*"))


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def items_of(batches):
    return [item for batch in batches for item in batch]


def text_of(item):
    assert item.ids[-1] == 256
    return bytes(item.ids[:-1]).decode()


def test_items_are_in_order_and_know_where_they_are_from(tmp_path, encode):
    expected = []
    for name in ("a.jsonl", "b.jsonl"):
        texts = [f"{name} é {i}" for i in range(30)]
        write_jsonl(tmp_path / name, texts)
        expected += [(text, (str(tmp_path / name), i)) for i, text in enumerate(texts, start=1)]
    batches = encode(jsonl_in(tmp_path))
    assert len(batches) > 5
    items = items_of(batches)
    assert [(text_of(item), item.position) for item in items] == expected
    assert {item.utf8_bytes - len(text_of(item)) for item in items} == {1}, "é has two"


@pytest.fixture
def mixed_files(tmp_path):
    """Good and bad lines, damaged archives and empty files: every input of a jsonl source."""
    good = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in GOOD_TEXTS]
    lines = [line for pair in zip([*good, *good], BAD_LINES, strict=False) for line in pair]
    (tmp_path / "1.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(lines) + b"\r\n")
    (tmp_path / "2.jsonl").touch()
    whole = b"".join(b'{"text": "%d"}\n' % i for i in range(5000))
    (tmp_path / "3.jsonl.zst").write_bytes(zstandard.compress(whole)[:-10])
    (tmp_path / "4.jsonl.gz").write_bytes(gzip.compress(b'{"text": "kept"}\n') + b"garbage")
    (tmp_path / "5.jsonl.zst").write_bytes(b"garbage")
    (tmp_path / "5b.jsonl.gz").write_bytes(gzip.compress(whole)[:-10])
    (tmp_path / "6.jsonl").symlink_to(tmp_path / "nowhere")
    write_jsonl(tmp_path / "7.jsonl", ["last"])
    return jsonl_in(tmp_path)


def test_whatever_can_be_wrong_is_counted_and_all_else_is_kept(mixed_files, encode):
    items = items_of(encode(mixed_files))
    skipped = Counter(item.reason for item in items if isinstance(item, Skipped))
    archives = ["truncated archive", "truncated archive", "corrupted archive", "corrupted archive"]
    wrong_files = ["empty file", "not a regular file", *archives]
    assert skipped == Counter([*BAD_LINES.values(), *wrong_files])
    texts = [text_of(item) for item in items if isinstance(item, Encoded)]
    assert texts[: len(BAD_LINES)] == [*GOOD_TEXTS, *GOOD_TEXTS][: len(BAD_LINES)]
    assert texts[-1] == "last"
    assert "kept" in texts


def test_a_run_goes_on_after_any_position(mixed_files, encode):
    batches = encode(mixed_files)
    whole = items_of(batches)
    assert len(batches) > 100
    for done in [*range(10), *range(10, len(batches), 97), *range(-10, 0)]:
        done %= len(batches)
        rest = items_of(encode(mixed_files, after=batches[done][-1].position))
        assert rest == whole[sum(map(len, batches[: done + 1])) :]


def test_workers_give_what_one_process_gives(tmp_path, mixed_files, encode, monkeypatch):
    monkeypatch.setattr(data.prepare.encode, "LONG", 2000)  # long documents do not go to workers
    write_jsonl(tmp_path / "7.jsonl", ["x" * 5000, "short", "y" * 5000, "z" * 5000])
    alone = encode(mixed_files)
    assert encode(mixed_files, workers=2) == alone
    assert [*map(len, alone[-4:])] == [1, 1, 1, 1]


class Deadly(Source):
    """Kills a worker process that parses it."""

    name: str = "deadly"

    def inputs(self):
        return {__file__: 0}

    def read(self, path, count_bytes):
        yield from ["x" * 100] * 100

    def parse(self, content):
        if multiprocessing.parent_process():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().parse(content)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_an_error(encode):
    with pytest.raises(UserError, match="a worker process was killed, perhaps because memory ran out"):
        encode(Deadly(), workers=2)
