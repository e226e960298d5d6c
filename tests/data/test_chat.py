"""Conversations as ids: the tokenizer with markers, and what a list of messages may be."""

import json

import numpy as np
import pytest

from common.settings import UserError
from data.tokenizers.build import (
    BytesConfig,
    HFConfig,
    build_tokenizer,
    load_tokenizer,
    save_tokenizer,
)
from data.tokenizers.chat import IGNORED, MARKERS, ChatTokenizer, answer_targets, parse_message

TALK = [("system", "Be brief."), ("user", "2+3?"), ("assistant", "5"), ("user", "<|end|>é"), ("assistant", "ok")]


@pytest.fixture(params=["bytes", "hf"])
def inner(request, dataset_dir, tmp_path):
    if request.param == "bytes":
        return build_tokenizer(BytesConfig(name="bytes"))
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install -e '.[tokenizers]'")
    from data.prepare.vocabulary import learn_vocabulary

    learn_vocabulary(dataset_dir, 280, tmp_path / "learned.json")
    return build_tokenizer(HFConfig(name="hf", path=tmp_path / "learned.json"))


def test_markers_come_after_the_last_id_and_text_never_has_them(inner, tmp_path):
    chat = ChatTokenizer(inner)
    n = inner.n_vocab
    assert (chat.name, chat.eot_id) == (f"{inner.name}+chat", inner.eot_id)
    assert b" ".join(chat.tokens[n:]).decode() == " ".join(MARKERS)
    assert chat.encode_chat([("user", "hi")], answer=True) == [n + 1, *inner.encode("hi"), n + 2]
    assert chat.byte_lengths.tolist() == [*inner.byte_lengths, 0, 0, 0, 0, 0]
    spelled = "a<|user|>b<|end|><|endoftext|>"
    assert chat.encode(spelled) == inner.encode(spelled)
    assert chat.decode_bytes([n, *chat.encode("hi"), n + 3]) == b"hi"
    assert chat.sha256 != inner.sha256
    assert [chat.extends(inner.sha256), chat.extends(chat.sha256), inner.extends(chat.sha256)] == [True, True, False]
    save_tokenizer(chat, tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.id, loaded.encode_chat(TALK)) == (chat.id, chat.encode_chat(TALK))


def test_what_cannot_have_markers(inner, tmp_path):
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
        (message("a", "critic"), NO_ROLE),
        (message("a", "untrained"), NO_ROLE),
        (message("a", "tool"), OF_TOOLS),
        (message(None, "assistant", tool_calls=[{}]), OF_TOOLS),
        (message(None, "assistant", function_call={"name": "f"}), OF_TOOLS),
        (message(None), NO_TEXT),
        (message([{"type": "text", "text": 3}]), NO_TEXT),
        (message("\ud800"), "surrogates not allowed"),
    ],
)
def test_a_message(given, expected):
    if isinstance(expected, tuple):
        assert parse_message(given) == expected
        return
    with pytest.raises((UserError, UnicodeEncodeError), match=expected):
        parse_message(given)


def test_targets_are_the_tokens_of_answers_with_their_end(inner):
    """From the definition: one message after the other."""
    chat = ChatTokenizer(inner)
    messages = [*TALK[:3], ("user", "again?"), ("untrained", "no"), *TALK[3:]]
    ids = [chat.eot_id]
    wanted = []
    for role, text in messages:
        marker = chat.assistant_id if role == "untrained" else chat.role_ids[role]
        said = [*chat.encode(text), *([chat.end_id] if role in ("assistant", "untrained") else [])]
        ids += [marker, *said]
        wanted += [IGNORED, *(said if role == "assistant" else [IGNORED] * len(said))]
    token_ids, targets = answer_targets(np.array([chat.eot_id, *chat.encode_chat(messages)]), chat.n_vocab)
    assert token_ids.tolist() == ids[:-1]
    assert targets.tolist() == wanted
