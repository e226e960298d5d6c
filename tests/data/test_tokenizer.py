import base64
import functools
import hashlib
import json

import numpy as np
import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiktoken_ext.openai_public import r50k_pat_str

import data.tokenizer_base
from common.settings import UserError
from data.tokenizer import EXACT_CUTS, BytesConfig, GPT2Config, build_tokenizer, load_tokenizer, save_tokenizer
from data.tokenizer_base import text_chunks

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
    expected = [15496, 11, 995, 0, 314, 1183, 220, 1949, 628, 220, 1105, 2682]
    assert tokenizer.encode("Hello, world! I'll  try\n\n  1234") == expected


def test_rank_file(small):
    tokenizer = build_tokenizer(GPT2Config(name="gpt2", path=small))
    assert (tokenizer.n_vocab, tokenizer.eot_id) == (259, 258)
    assert tokenizer.encode("abcab") == [257, 256]


def test_end_of_text_in_a_text_is_text(small):
    for tokenizer in (BYTES, build_tokenizer(GPT2Config(name="gpt2", path=small))):
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.eot_id not in ids
        assert tokenizer.decode_bytes(ids) == b"a<|endoftext|>b"


LINES = [b"YWI=", b"YWI= 256 2", b"YWI= x", b"Y*I= 256", b"Y\xff== 256"]  # that are no token and its rank


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace(b"YWI= 256", b"YWI= 300"), "line 257 is not 'base64 256': .* ranks in order"),
        (lambda text: text.replace(b"QQ== 65\n", b"YWE= 65\n"), "lack the single byte 0x41"),
        (lambda text: text.replace(b"YWI= 256", b"YWJj 256"), "one token twice"),
        (lambda text: b"", "lack the single byte 0x00"),
        *((lambda text, line=line: text.replace(b"YWI= 256", line), "line 257 is not 'base64 256'") for line in LINES),
    ],
)
def test_wrong_rank_files(small, change, message):
    small.write_bytes(change(small.read_bytes()))
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
NO_SPACES = "\x1c\x1d\x1e\x1f\u180e\u200b\ufeff\0"  # to GPT-2's pattern; some of them are spaces to Python
WORDS = [*"abZ19!.'éß日。٣²Ⅷ", "!\x1c", "'s", "'ll", "<|endoftext|>"]
MARKS = ["\u0301", "\u200d", "😀", "🇩"]
NASTY = st.lists(st.sampled_from([*SPACES, "  ", "     ", *NO_SPACES, *WORDS, *MARKS]), max_size=30).map("".join)


@pytest.fixture
def gpt2(gpt2_ranks):
    return from_ranks(gpt2_ranks)


@functools.cache
def of_tiktoken(tokenizer):
    """tiktoken's own GPT-2 with these ranks."""
    ranks = {token: rank for rank, token in enumerate(tokenizer.ranks)}
    special = {"<|endoftext|>": tokenizer.eot_id}
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)


def encode_ordinary(tokenizer, text):
    return of_tiktoken(tokenizer).encode_ordinary(text)


@functools.cache
def from_ranks(path):
    return build_tokenizer(GPT2Config(name="gpt2", path=path))


@pytest.fixture
def chunk_sizes(monkeypatch):
    """Sets the sizes that texts are cut at."""

    def set_(size, longest=10**9):
        monkeypatch.setattr(data.tokenizer_base, "_CHUNK", size)
        monkeypatch.setattr(data.tokenizer_base, "_LONGEST_CHUNK", longest)

    return set_


def pairs_of(tmp_path_factory):
    """Every byte and some pairs: a wrong cut gives other ids."""
    path = tmp_path_factory.getbasetemp() / "nasty.tiktoken"
    if path.exists():
        return from_ranks(path)
    pairs = ["  ", "    ", "\n\n", " a", "ab", "'s", "s1", "a1", "!!", "!a", "a!", "11", "\r\n", "\n ", " \n", "!\x1c"]
    tokens = [pair.encode() for pair in pairs]
    path.write_text(rank_lines([*SINGLE, *(base64.b64encode(token).decode() for token in tokens)]))
    return from_ranks(path)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=NASTY, size=st.one_of(st.integers(1, 6), st.just(1000)))
def test_long_texts_give_the_ids_of_encode_ordinary(tmp_path_factory, chunk_sizes, text, size):
    tokenizer = pairs_of(tmp_path_factory)
    chunk_sizes(size)
    cut = list(text_chunks(text, EXACT_CUTS))
    assert "".join(cut) == text
    assert tokenizer.encode(text) == encode_ordinary(tokenizer, text)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=NASTY)
def test_a_text_that_is_cut_by_force_is_still_the_text(tmp_path_factory, chunk_sizes, text):
    tokenizer = pairs_of(tmp_path_factory)
    chunk_sizes(2, longest=4)
    cut = list(text_chunks(text, EXACT_CUTS))
    assert all(len(piece) <= 4 for piece in cut)
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


MILLION = 10**6


@pytest.mark.parametrize("text", ["a" * MILLION, " " * MILLION], ids=["a", "spaces"])
def test_a_million_of_the_same(gpt2, text):
    assert gpt2.encode(text) == encode_ordinary(gpt2, text)


def test_a_million_spaces_before_a_letter(gpt2):
    """encode_ordinary panics there; it takes all but the last space as one."""
    ids = gpt2.encode("x" + " " * MILLION + "y")
    assert ids == [87, *[220] * (MILLION - 1), *encode_ordinary(gpt2, " y")]


def test_save_and_load(small, tmp_path):
    for tokenizer in (BYTES, build_tokenizer(GPT2Config(name="gpt2", path=small))):
        save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
        loaded = load_tokenizer(tmp_path / "tokenizer.json")
        assert (loaded.name, loaded.n_vocab, loaded.sha256) == (tokenizer.name, tokenizer.n_vocab, tokenizer.sha256)
        assert loaded.encode("abc ab") == tokenizer.encode("abc ab")


@pytest.mark.parametrize(
    "change",
    [
        *("", "[]", "null", "{", '{"name": "bytes"}'),
        {"name": "gpt9"},
        {"name": "\x1b[2J" * 10**5},
        {"format_version": 2},
        {"sha256": "0" * 64},
        {"ranks": SINGLE[:-1]},
        {"ranks": SINGLE[::-1]},
        {"ranks": SINGLE * 2},
        {"ranks": [*SINGLE[:-1], "ü"]},
        {"ranks": [*SINGLE[:-1], 7]},
    ],
)
def test_damaged_and_other_files_are_refused(tmp_path, change):
    path = tmp_path / "tokenizer.json"
    save_tokenizer(BYTES, path)
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=r"tokenizer\.json is (not a tokenizer|damaged)") as refused:
        load_tokenizer(path)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1500
