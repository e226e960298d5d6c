"""data=chat, and data=hf with a column of conversations."""

import json

import pytest

from common.settings import UserError, decode
from data.document_index import find_documents
from data.prepare.dataset import PrepareConfig, prepare_dataset
from data.prepare.verify import verify_dataset
from data.shards import TokenStream, read_manifest
from data.tokenizers.build import load_tokenizer
from data.tokenizers.chat import MARKERS


def talk(i):
    return [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": str(i + 1)}]


GOOD = [{"messages": talk(i)} for i in range(30)]
BAD = {
    "a conversation without an answer to learn": [{"messages": talk(1)[:1]}, {"messages": []}],
    "a weight other than 0 and 1": [{"messages": [talk(1)[0], talk(1)[1] | {"weight": 0.5}]}],
    "a message whose content is not text": [{"messages": [*talk(1), {"role": "user", "content": None}]}],
    "an empty answer": [{"prompt": "a", "completion": " \n"}],
    "lone surrogate": [{"prompt": "\ud800", "completion": "b"}],
    "no conversation": [
        {"text": "hello"},
        3,
        {"messages": "hello"},
        {"input": "a", "output": "b"},
        {"completion": "b"},
    ],
}


@pytest.fixture
def chat(tmp_path):
    """Prepares records as data=chat, or as other data."""

    def build(records, **changes):
        (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        raw = {"data": {"name": "chat", "path": str(tmp_path / "chat.jsonl")}, "tokenizer": {"name": "bytes"}}
        return prepare_dataset(decode(PrepareConfig, raw | {"out_dir": str(tmp_path / "out"), "workers": 1} | changes))

    return build


def ids_in(folder):
    """The conversations of a dataset, a list of ids for each."""
    found = []
    for split in ("train", "val"):
        stream = TokenStream(folder, read_manifest(folder), split)
        for document in find_documents(stream, 0, stream.n_tokens):
            found.append(stream.read_stored(document.start, document.stop - 1).tolist())
    return found


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_conversations_are_written_whole_and_others_are_counted_by_reason(chat, tmp_path, rank_file, tokenizer):
    # The first is as nanochat writes it.
    records = [talk(0), *GOOD[1:], {"prompt": "Well?", "completion": "yes"}]
    records.append({"prompt": talk(77)[:1], "completion": talk(77)[1:]})
    for some in BAD.values():
        records += some
    given = {"name": "bytes"}
    if tokenizer == "gpt2":
        given = {"name": "gpt2", "path": str(rank_file)}
    manifest = chat(records, tokenizer=given, val_fraction=0.1)
    assert manifest.skipped == {reason: len(some) for reason, some in sorted(BAD.items())}
    assert manifest.tokenizer.name == f"{tokenizer}+chat"
    assert manifest.tokenizer.markers == [*MARKERS]
    saved = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    said = [[("user", f"{i} + 1?"), ("assistant", str(i + 1))] for i in (*range(30), 77)]
    said.append([("user", "Well?"), ("assistant", "yes")])
    found = ids_in(tmp_path / "out")
    assert sorted(found) == sorted(map(saved.encode_chat, said)), "a small corpus is not cut either"
    n_bytes = sum(len(text) for each in said for _, text in each)
    assert sum(split.total.utf8_bytes for split in manifest.splits.values()) == n_bytes
    assert verify_dataset(tmp_path / "out") == []
    assert chat(records, tokenizer=given, val_fraction=0.1) == manifest, "it is there already"


@pytest.mark.parametrize(
    ("records", "changes", "message"),
    [
        (
            [*GOOD, *BAD["an empty answer"]],
            {"on_error": "stop"},
            r"chat.jsonl:31: an empty answer: correct it; or skip such",
        ),
        (
            [{"text": "hello", "messages": None}] * 5,
            {},
            r"no conversation in 5 of .*chat.jsonl:1 with 'text'\): give data.text_field=KEY .*messages.*"
            r"conversations.*from.*human.*instruction.*output",
        ),
        ([{"messages": [{"who": "human", "value": "a"}]}], {}, 'chat.jsonl:1: write each as {"role": "user", "c'),
    ],
)
def test_what_cannot_be_prepared_is_one_line(chat, records, changes, message):
    with pytest.raises(UserError, match=message):
        chat(records, **changes)


QUESTION, ANSWER = [("user", "Sum?\n\n1 2"), ("assistant", "3")]
SHAPES = {
    "sharegpt": {"conversations": [{"from": "human", "value": QUESTION[1]}, {"from": "gpt", "value": "3"}]},
    "alpaca": {"instruction": "Sum?", "input": "1 2", "output": "3"},
    "openai": {"messages": [{"role": "user", "content": QUESTION[1]}, {"role": "assistant", "content": "3"}]},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["lines", "array", "pretty array", "hub", "another column"])
def test_three_shapes_give_the_same_conversation(chat, tmp_path, shape, layout):
    record = SHAPES[shape] | {"system": "Be brief.", "text": "all of it in one text, as Alpaca has"}
    if layout == "another column":
        record = {{"messages": "talk", "conversations": "talk"}.get(key, key): value for key, value in record.items()}
    records = [record] * 20
    file = tmp_path / "chat.json"
    data = {"name": "chat", "path": str(file)}
    if layout == "hub":
        pytest.importorskip("datasets")
        # The column of messages says that these are conversations.
        data = {"name": "hf", "path": "json", "data_files": str(file), "text_field": "messages"}
    if layout == "another column":
        data["text_field"] = "talk"
    lines = layout in ("lines", "another column")
    indent = 1 if layout == "pretty array" else None
    file.write_text("\n".join(map(json.dumps, records)) if lines else json.dumps(records, indent=indent))
    chat([], data=data, val_tokens=40)
    chat_tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    assert ids_in(tmp_path / "out") == [chat_tokenizer.encode_chat([("system", "Be brief."), QUESTION, ANSWER])] * 20


def test_answers_without_weight_are_marked_and_keys_that_are_not_read_are_named_once(chat, tmp_path, capsys):
    def answers(*extra):
        messages = [{"role": "user", "content": "a", "name": "Eve"}]
        for change in extra:
            messages += [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"} | change]
        return {"messages": messages, "tools": [{"type": "function"}]}

    more = {"trainable": False}, {"reasoning_content": "hm"}
    chat([answers({"weight": 0}, {"weight": 1}, {"train": False}, *more)] * 20, val_tokens=30)
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    trained = tokenizer.assistant_id
    not_trained = tokenizer.role_ids["untrained"]
    markers = [i for i in ids_in(tmp_path / "out")[0] if i in (trained, not_trained)]
    assert markers == [not_trained, trained, not_trained, not_trained, trained]
    named = [f"{key} in 20 conversations" for key in ("name", "reasoning_content", "tools")]
    message = f"not read, although it changes what is said: {', '.join(named)}"
    assert message in capsys.readouterr().err
    with pytest.raises(UserError, match="a conversation without an answer to learn"):
        chat([answers({"weight": 0})], out_dir=str(tmp_path / "none"))
