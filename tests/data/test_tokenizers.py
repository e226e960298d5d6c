import base64
import functools
import hashlib
import json

import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiktoken_ext.openai_public import r50k_pat_str

import data.tokenizers.interface
from common.settings import UserError
from data.tokenizers.build import (
    EXACT_CUTS,
    BytesConfig,
    GPT2Config,
    RankTokenizer,
    build_tokenizer,
    load_tokenizer,
    save_tokenizer,
)
from data.tokenizers.interface import cut_text

BYTES = build_tokenizer(BytesConfig(name="bytes"))
SINGLE = [bytes([i]) for i in range(256)]
IN_BASE64 = [base64.b64encode(token).decode() for token in SINGLE]


def write_ranks(path, tokens):
    path.write_text("".join(f"{token} {rank}\n" for rank, token in enumerate(tokens)))


@pytest.fixture
def small(tmp_path):
    """256 single bytes and two pairs, as a rank file."""
    path = tmp_path / "small.tiktoken"
    write_ranks(path, [*IN_BASE64, "YWI=", "YWJj"])  # ab, abc
    return path


@settings(deadline=None)
@given(st.text())
def test_bytes_are_utf8(text):
    ids = BYTES.encode(text)
    assert ids == list(text.encode()) == BYTES.encoding.encode_ordinary(text)
    assert BYTES.decode_bytes(ids) == text.encode()


def test_the_bytes_have_257_ids(tmp_path):
    assert (BYTES.name, BYTES.n_vocab, BYTES.eot_id) == ("bytes", 257, 256)
    assert BYTES.byte_lengths.tolist() == [1] * 256 + [0]
    assert BYTES.decode_bytes([104, 105, 256]) == b"hi<|endoftext|>"
    write_ranks(tmp_path / "bytes", IN_BASE64)
    assert BYTES.sha256 == hashlib.sha256((tmp_path / "bytes").read_bytes()).hexdigest()


def test_gpt2_is_gpt2(gpt2_ranks):
    tokenizer = build_tokenizer(GPT2Config(name="gpt2", path=gpt2_ranks))
    assert (tokenizer.n_vocab, tokenizer.eot_id) == (50257, 50256)
    assert tokenizer.sha256 == hashlib.sha256(gpt2_ranks.read_bytes()).hexdigest()
    expected = [15496, 11, 995, 0, 314, 1183, 220, 1949, 628, 220, 1105, 2682]
    assert tokenizer.encode("Hello, world! I'll  try\n\n  1234") == expected


def test_a_rank_file_and_a_saved_one(small, tmp_path):
    tokenizer = build_tokenizer(GPT2Config(name="gpt2", path=small))
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    for each in (tokenizer, load_tokenizer(tmp_path / "tokenizer.json")):
        assert (each.name, each.n_vocab, each.eot_id) == ("gpt2", 259, 258)
        assert each.sha256 == hashlib.sha256(small.read_bytes()).hexdigest()
        assert each.encode("abcab") == [257, 256]
        ids = each.encode("a<|endoftext|>b")
        assert each.eot_id not in ids, "it is text"
        assert each.decode_bytes(ids) == b"a<|endoftext|>b"


# These are no token and its rank.
LINES = [b"YWI=", b"YWI= 256 2", b"YWI= x", b"Y*I= 256", b"Y\xff== 256", b"YWI= 300"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"QQ== 65\n", b"YWE= 65\n", "must have each single byte"),
        (b"YWI= 256", b"YWJj 256", "no token twice"),
        *((b"YWI= 256", line, "line 257 is not 'base64 256': .* in order") for line in LINES),
    ],
)
def test_wrong_rank_files(small, old, new, message):
    small.write_bytes(small.read_bytes().replace(old, new))
    with pytest.raises(UserError, match=message) as refused:
        build_tokenizer(GPT2Config(name="gpt2", path=small))
    assert str(refused.value).isprintable()


def test_no_network(monkeypatch):
    def get_encoding(name):
        raise ConnectionError("no route")

    monkeypatch.setattr("tiktoken.get_encoding", get_encoding)
    with pytest.raises(UserError, match=r"tokenizer\.path=FILE, or set TIKTOKEN_CACHE_DIR"):
        build_tokenizer(GPT2Config(name="gpt2"))


SPACES = " \t\n\v\f\r\x85\xa0\u1680\u2000\u2028\u2029\u202f\u205f\u3000"
# To GPT-2's pattern; some of them are spaces to Python.
NO_SPACES = "\x1c\x1d\x1e\x1f\u180e\u200b\ufeff\0"
WORDS = [*"abZ19!.'éß日。٣²Ⅷ", "!\x1c", "'s", "'ll", "<|endoftext|>"]
MARKS = ["\u0301", "\u200d", "😀", "🇩"]
PARTS = [*SPACES, "  ", "     ", *NO_SPACES, *WORDS, *MARKS]
NASTY = st.lists(st.sampled_from(PARTS), max_size=30).map("".join)
PAIRS = ["  ", "    ", "\n\n", " a", "ab", "'s", "s1", "a1", "!!", "!a", "a!", "11", "\r\n", "\n ", " \n", "!\x1c"]
NASTY_TOKENIZER = RankTokenizer("gpt2", [*SINGLE, *(pair.encode() for pair in PAIRS)])
"""Every byte and some pairs: a wrong cut gives other ids."""


@functools.cache
def of_tiktoken(tokenizer):
    """tiktoken's own GPT-2 with these ranks."""
    ranks = {token: rank for rank, token in enumerate(tokenizer.ranks)}
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=NASTY, size=st.one_of(st.integers(1, 6), st.just(1000)))
def test_long_texts_give_the_ids_of_encode_ordinary(monkeypatch, text, size):
    monkeypatch.setattr(data.tokenizers.interface, "_CHUNK", size)
    monkeypatch.setattr(data.tokenizers.interface, "_LONGEST_CHUNK", 10**9)
    assert "".join(cut_text(text, EXACT_CUTS)) == text
    expected = of_tiktoken(NASTY_TOKENIZER).encode_ordinary(text)
    assert NASTY_TOKENIZER.encode(text) == expected


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=NASTY)
def test_a_text_that_is_cut_by_force_is_still_the_text(monkeypatch, text):
    monkeypatch.setattr(data.tokenizers.interface, "_CHUNK", 2)
    monkeypatch.setattr(data.tokenizers.interface, "_LONGEST_CHUNK", 4)
    assert all(len(chunk) <= 4 for chunk in cut_text(text, EXACT_CUTS))
    ids = NASTY_TOKENIZER.encode(text)
    assert NASTY_TOKENIZER.decode_bytes(ids) == text.encode()
    assert NASTY_TOKENIZER.byte_lengths[ids].sum() == len(text.encode())


@pytest.mark.parametrize("character", ["a", " "])
def test_a_million_of_the_same(gpt2_ranks, character):
    gpt2 = build_tokenizer(GPT2Config(name="gpt2", path=gpt2_ranks))
    text = character * 10**6
    assert gpt2.encode(text) == of_tiktoken(gpt2).encode_ordinary(text)
    # encode_ordinary panics there; it takes all but the last space as one.
    ids = gpt2.encode("x" + " " * 10**6 + "y")
    assert ids == [87, *[220] * (10**6 - 1), *gpt2.encode(" y")]


@pytest.mark.parametrize(
    "change",
    [
        *("", "[]", "null", "{", '{"name": "bytes"}'),
        {"name": "gpt9"},
        {"name": "\x1b[2J" * 10**5},
        {"format_version": 2},
        {"ranks": IN_BASE64[:-1]},
        {"ranks": IN_BASE64 * 2},
        {"ranks": [*IN_BASE64[:-1], "ü"]},
        {"ranks": [*IN_BASE64[:-1], 7]},
    ],
)
def test_damaged_and_other_files_are_refused(tmp_path, change):
    path = tmp_path / "tokenizer.json"
    path.write_text(change if isinstance(change, str) else json.dumps(BYTES.saved | change))
    with pytest.raises(UserError, match=r"tokenizer\.json is (not a tokenizer|damaged)") as refused:
        load_tokenizer(path)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1500
