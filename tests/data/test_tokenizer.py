import base64
import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.settings import UserError
from data.tokenizer import BytesConfig, GPT2Config, build_tokenizer, load_tokenizer, save_tokenizer

BYTES = build_tokenizer(BytesConfig(name="bytes"))
SINGLE = [base64.b64encode(bytes([i])).decode() for i in range(256)]


def rank_lines(tokens):
    return "".join(f"{token} {rank}\n" for rank, token in enumerate(tokens))


@pytest.fixture
def small(tmp_path):
    """256 single bytes and two pairs, as a rank file."""
    path = tmp_path / "small.tiktoken"
    path.write_text(rank_lines([*SINGLE, "YWI=", "YWJj"]))  # ab, abc
    return path


@settings(deadline=None)
@given(st.text())
def test_bytes_are_utf8(text):
    ids = BYTES.encode(text)
    assert ids == list(text.encode()) == BYTES.encoding.encode_ordinary(text)
    assert BYTES.decode_bytes(ids) == text.encode()


def test_bytes_sizes():
    assert (BYTES.name, BYTES.n_vocab, BYTES.eot_id) == ("bytes", 257, 256)
    assert BYTES.byte_lengths.tolist() == [1] * 256 + [0]
    assert BYTES.byte_lengths.dtype == np.int64
    assert BYTES.decode_bytes([104, 105, 256]) == b"hi<|endoftext|>"
    assert BYTES.sha256 == hashlib.sha256(rank_lines(SINGLE).encode()).hexdigest()


def test_gpt2_is_gpt2(gpt2_ranks):
    tokenizer = build_tokenizer(GPT2Config(name="gpt2", path=gpt2_ranks))
    assert (tokenizer.n_vocab, tokenizer.eot_id) == (50257, 50256)
    assert tokenizer.sha256 == hashlib.sha256(gpt2_ranks.read_bytes()).hexdigest()
    assert tokenizer.encode("Hello, world! I'll  try\n\n  1234") == [
        15496,
        11,
        995,
        0,
        314,
        1183,
        220,
        1949,
        628,
        220,
        1105,
        2682,
    ]


def test_rank_file(small, tmp_path):
    tokenizer = build_tokenizer(GPT2Config(name="gpt2", path=small))
    assert (tokenizer.n_vocab, tokenizer.eot_id) == (259, 258)
    assert tokenizer.encode("abcab") == [257, 256]
    shuffled = tmp_path / "shuffled.tiktoken"
    shuffled.write_text("".join(reversed(small.read_text().splitlines(keepends=True))))
    assert build_tokenizer(GPT2Config(name="gpt2", path=shuffled)).sha256 == tokenizer.sha256


@settings(deadline=None)
@given(text=st.text())
def test_round_trip_with_pairs(text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "pairs.tiktoken"
    path.write_text(rank_lines([*SINGLE, "YWI=", "YWJj", "ICA="]))
    tokenizer = build_tokenizer(GPT2Config(name="gpt2", path=path))
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


def test_end_of_text_in_a_text_is_text(small):
    for tokenizer in (BYTES, build_tokenizer(GPT2Config(name="gpt2", path=small))):
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.eot_id not in ids
        assert tokenizer.decode_bytes(ids) == b"a<|endoftext|>b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("YWI= 256", "YWI="), "line 257 is not 'base64 rank'"),
        (lambda text: text.replace("YWI= 256", "Y*I= 256"), "line 257 is not 'base64 rank'"),
        (lambda text: text.replace("YWI= 256", "YWI= 300"), "no rank 256"),
        (lambda text: text.replace("YWI= 256", "YWI= 255"), "no rank 256"),
        (lambda text: text.replace("QQ== 65\n", "YWE= 65\n"), "lack the single byte 0x41"),
        (lambda text: text.replace("YWI= 256", "YWJj 256"), "one token twice"),
        (lambda text: "", "lack the single byte 0x00"),
    ],
)
def test_wrong_rank_files(small, change, message):
    small.write_text(change(small.read_text()))
    with pytest.raises(UserError, match=message):
        build_tokenizer(GPT2Config(name="gpt2", path=small))


def test_missing_rank_file(tmp_path):
    with pytest.raises(UserError, match=r"none\.tiktoken cannot be read \(No such file"):
        build_tokenizer(GPT2Config(name="gpt2", path=tmp_path / "none.tiktoken"))


def test_no_network(monkeypatch):
    def get_encoding(name):
        raise ConnectionError("no route")

    monkeypatch.setattr("tiktoken.get_encoding", get_encoding)
    with pytest.raises(UserError, match=r"tokenizer\.path=FILE, or set TIKTOKEN_CACHE_DIR"):
        build_tokenizer(GPT2Config(name="gpt2"))


def test_download_gives_the_ranks(monkeypatch, small):
    local = build_tokenizer(GPT2Config(name="gpt2", path=small))
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: local.encoding)
    assert build_tokenizer(GPT2Config(name="gpt2")).sha256 == local.sha256


def test_save_and_load(small, tmp_path):
    for tokenizer in (BYTES, build_tokenizer(GPT2Config(name="gpt2", path=small))):
        save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
        loaded = load_tokenizer(tmp_path / "tokenizer.json")
        assert (loaded.name, loaded.n_vocab, loaded.sha256) == (tokenizer.name, tokenizer.n_vocab, tokenizer.sha256)
        assert loaded.encode("abc ab") == tokenizer.encode("abc ab")


@pytest.mark.parametrize(
    "change",
    [
        {"name": "gpt9"},
        {"name": ["bytes"]},
        {"format_version": 2},
        {"format_version": "1"},
        {"sha256": "0" * 64},
        {"ranks": SINGLE[:-1]},
        {"ranks": SINGLE[::-1]},
        {"ranks": [*SINGLE, "YWI="]},
        {"ranks": [*SINGLE[:-1], "ü"]},
        {"ranks": [*SINGLE[:-1], 7]},
        {"ranks": {}},
        {"pat_str": "(a*)*b"},
    ],
)
def test_damaged_files_are_refused(tmp_path, change):
    path = tmp_path / "tokenizer.json"
    save_tokenizer(BYTES, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=r"tokenizer\.json is (not a tokenizer|damaged)"):
        load_tokenizer(path)


@pytest.mark.parametrize("content", ["", "[]", "null", "{", '{"name": "bytes"}'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(path)
