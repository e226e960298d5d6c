"""Conversations as ids: the tokenizer with markers, and what a list of messages may be."""

import itertools
import json

import numpy as np
import pytest

import data.chat
from common.settings import UserError
from data.chat import MARKERS, ChatTokenizer, parse_message
from data.loader import IGNORED, EvalBatches, TrainBatches
from data.tokenizer import (
    BytesConfig,
    GPT2Config,
    HFConfig,
    NoneConfig,
    build_tokenizer,
    load_tokenizer,
    save_tokenizer,
)

TALK = [("system", "Be brief."), ("user", "2+3?"), ("assistant", "5"), ("user", "<|end|>é"), ("assistant", "ok")]


@pytest.fixture(params=["bytes", "gpt2", "hf"])
def inner(request, rank_file, dataset_dir, tmp_path):
    if request.param == "bytes":
        return build_tokenizer(BytesConfig(name="bytes"))
    if request.param == "gpt2":
        return build_tokenizer(GPT2Config(name="gpt2", path=rank_file))
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install -e '.[tokenizers]'")
    from data.prepare.vocabulary import learn

    learn(dataset_dir, 280, tmp_path / "learned.json")
    return build_tokenizer(HFConfig(name="hf", path=tmp_path / "learned.json"))


def test_markers_come_after_the_last_id_and_text_never_has_them(inner, tmp_path):
    chat, n = ChatTokenizer(inner), inner.n_vocab
    assert (chat.name, chat.n_vocab, chat.eot_id) == (f"{inner.name}+chat", n + 4, inner.eot_id)
    assert [chat.tokens[i].decode() for i in range(n, n + 4)] == list(MARKERS)
    assert (chat.assistant_id, chat.end_id) == (n + 2, n + 3)
    assert chat.byte_lengths.tolist() == [*inner.byte_lengths, 0, 0, 0, 0]
    spelled = "a<|user|>b<|end|><|endoftext|>"
    assert chat.encode(spelled) == inner.encode(spelled)
    assert chat.decode_bytes([n, *chat.encode("hi"), n + 3]) == b"hi"
    assert chat.sha256 != inner.sha256
    assert [chat.extends(inner.sha256), chat.extends(chat.sha256), inner.extends(chat.sha256)] == [True, True, False]
    save_tokenizer(chat, tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.id, loaded.encode_chat(TALK)) == (chat.id, chat.encode_chat(TALK))


def test_ids_of_a_conversation(inner):
    chat, n, encode = ChatTokenizer(inner), inner.n_vocab, inner.encode
    first = [n, *encode("Be brief."), n + 1, *encode("2+3?"), n + 2, *encode("5"), n + 3]
    assert chat.encode_chat(TALK) == [*first, n + 1, *encode("<|end|>é"), n + 2, *encode("ok"), n + 3]
    assert chat.encode_chat(TALK[:2], answer=True) == [n, *encode("Be brief."), n + 1, *encode("2+3?"), n + 2]


def test_what_cannot_have_markers(inner, tmp_path):
    with pytest.raises(UserError, match=r"need a tokenizer of texts: give tokenizer=bytes, gpt2 or hf"):
        ChatTokenizer(build_tokenizer(NoneConfig(name="none", n_vocab=9, eot_id=None)))
    with pytest.raises(UserError, match=r"a token <\|assistant\|> of its own"):
        ChatTokenizer(ChatTokenizer(inner))
    for change in ({"chat": ["<|end|>"]}, {"chat": 1}, {"more": 1}, {"tokenizer": ChatTokenizer(inner).saved}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(ChatTokenizer(inner).saved | change))
        with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer: (its markers are not|the tokenizer)"):
            load_tokenizer(tmp_path / "tokenizer.json")


def message(content, role="user", **more):
    return {"role": role, "content": content, **more}


NO_ROLE = "a message whose role is not system, user or assistant"
OF_TOOLS = "a message to or from a tool"
NO_TEXT = "a message whose content is not text"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (message("b", "assistant"), ("assistant", "b")),
        (message("", "developer"), ("system", "")),
        (message([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), ("user", "ab")),
        ("hello", NO_ROLE),
        (message("a", ["user"]), NO_ROLE),
        (message("a", "critic"), NO_ROLE),
        (message("a", "tool"), OF_TOOLS),
        (message(None, "assistant", tool_calls=[{}]), OF_TOOLS),
        (message(None, "assistant", function_call={"name": "f"}), OF_TOOLS),
        (message(None), NO_TEXT),
        (message([{"type": "image_url"}]), NO_TEXT),
        (message([{"type": "text", "text": 3}]), NO_TEXT),
        (message("\ud800"), "surrogates not allowed"),
    ],
)
def test_a_message(given, expected):
    if isinstance(expected, tuple):
        assert parse_message(given) == expected
    else:
        with pytest.raises((UserError, UnicodeEncodeError), match=expected):
            parse_message(given)


EOT, SYSTEM, USER, ASSISTANT, END = 9, 10, 11, 12, 13  # of 14 ids; 0 to 8 are text


class Stream:
    """Ids in memory, in place of a split."""

    split, eot_id, n_vocab, loss = "train", EOT, 14, "answers"

    def __init__(self, ids):
        self.ids, self.n_tokens = np.array(ids), len(ids)

    def read(self, start, stop):
        assert 0 <= start <= stop <= self.n_tokens
        return self.ids[start:stop]


def targets_by_definition(ids):
    """The target after each token but the last, -1 where it is not of an answer: one token after the other."""
    targets, answers = [], False
    for token, following in itertools.pairwise(ids):
        if token >= EOT:
            answers = token == ASSISTANT
        targets.append(int(following) if answers else IGNORED)
    return targets


def drawn(seed):
    """Documents of text and markers in any order, with long stretches without any."""
    rng, ids = np.random.default_rng(seed), []
    while len(ids) < 200:
        special = rng.choice([EOT, SYSTEM, USER, ASSISTANT, ASSISTANT, END])
        ids += [special, *rng.integers(0, 9, rng.choice([0, 1, 2, 5, 30]))]
    return ids


TWO = [USER, 1, ASSISTANT, 2, 3, END, USER, 4, ASSISTANT, 5, END, EOT, 6, 7, EOT, SYSTEM, 8, USER, 0, ASSISTANT, 1, END]


@pytest.mark.parametrize("seq_len", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("ids", [TWO, [1, 2, *TWO], *map(drawn, range(5))])
def test_windows_count_the_tokens_of_answers_wherever_they_begin(ids, seq_len, monkeypatch):
    monkeypatch.setattr(data.chat, "_CHUNK", 4)
    stream, truth = Stream(ids), targets_by_definition(ids)
    if seq_len < len(ids):
        batches = TrainBatches(stream, seq_len, 3, seed=1)
        token_ids, targets = batches.batch(2)
        for begin, row, wanted in zip(batches.starts(2), token_ids, targets, strict=True):
            assert row.tolist() == list(ids[begin : begin + seq_len])
            assert wanted.tolist() == truth[begin : begin + seq_len]
    for stride in (None, 1, max(1, seq_len // 2)):
        windows, found = EvalBatches(stream, seq_len, stride=stride), {}
        for i, row in enumerate(windows.rows(0, len(windows))[1]):
            places = windows.bounds(i)[0] + np.flatnonzero(row != IGNORED)
            assert not found.keys() & {*places.tolist()}, "every target once"
            found |= dict(zip(places.tolist(), row[row != IGNORED].tolist(), strict=True))
        assert found == {i: target for i, target in enumerate(truth) if target != IGNORED}
