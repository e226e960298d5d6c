"""Recall tasks: what a checker that knows only their definition makes of the documents."""

import json
import random
import re

import pytest

from common.settings import UserError, decode
from data.loader import EvalBatches
from data.prepare.dataset import PrepareConfig
from data.prepare.items import Position
from data.prepare.tasks import InductionSource, MqarSource, PasskeySource, SelectiveCopySource
from data.shards import TokenStream, read_manifest

SETTINGS = [
    {"name": "mqar", "n_pairs": 1},
    {"name": "mqar", "n_pairs": 64},
    {"name": "mqar", "n_pairs": 100, "key_letters": 2},
    {"name": "induction", "length": 2},
    {"name": "induction", "length": 100},
    {"name": "selective_copy", "length": 5, "n_letters": 5},
    {"name": "selective_copy", "length": 100, "n_letters": 7},
    {"name": "passkey", "length": 1},
    {"name": "passkey", "length": 500},
]
CLASSES = {"mqar": MqarSource, "induction": InductionSource, "selective_copy": SelectiveCopySource}
CLASSES["passkey"] = PasskeySource


def source(settings):
    return decode(CLASSES[settings["name"]], {"n_documents": 30, **settings})


def texts(settings, after=None):
    of = source(settings)
    return [of.parse(raw).text for raw in of.documents(after=after)]


def expected(settings, text):
    """The places of the answers in a text, and what its context says that they are."""
    if settings["name"] == "mqar":
        n, width = settings["n_pairs"], settings.get("key_letters", 1)
        words = [text[i : i + width + 1] for i in range(0, len(text), width + 1)]
        pairs = {word[:-1]: word[-1] for word in words[:n]}
        asked = [word[:-1] for word in words[n:]]
        assert len(pairs) == n, "keys are distinct"
        assert sorted(asked) == sorted(pairs), "each key is asked for once"
        assert n < 10 or asked != list(pairs), "in another order"
        return {(n + i + 1) * (width + 1) - 1: pairs[key] for i, key in enumerate(asked)}
    if settings["name"] == "induction":
        before, asked = text[:-1], text[-2]
        assert len(text) == settings["length"] + 2
        assert before.count(asked) == 2, "the letter has one earlier place"
        return {len(text) - 1: text[text.index(asked) + 1]}
    if settings["name"] == "selective_copy":
        scattered, _, copied = text.partition(":")
        assert len(scattered) == settings["length"]
        letters = scattered.replace(".", "")
        assert len(letters) == len(copied) == settings["n_letters"]
        return {len(scattered) + 1 + i: letter for i, letter in enumerate(letters)}
    hidden = set(re.findall(r"The pass key is (\d+)\. Remember it\. (\d+) is the pass key\. ", text))
    ((key, again),) = hidden
    assert key == again
    assert text.endswith("What is the pass key? The pass key is " + text[-5:])
    assert len(re.findall(r"\d+", text)) == 3
    return {len(text) - 5 + i: digit for i, digit in enumerate(key)}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_answers_are_determined_by_the_context_and_right(settings):
    found = texts(settings)
    assert len(found) == 30
    answers = source(settings).answers
    for text in found:
        assert text.isascii()
        assert text.isprintable()
        assert len(text) == answers[-1] + 1 == len(found[0]), "the last answer ends the text"
        wanted = expected(settings, text)
        assert list(wanted) == list(answers)
        assert {i: text[i] for i in answers} == wanted
    assert len(set(found)) > 15 or settings.get("n_pairs") == 1


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_documents_depend_on_seed_and_number_alone(settings):
    found, name = texts(settings), settings["name"]
    random.seed(7)
    assert found == texts(settings | {"n_documents": 40})[:30]
    assert found != texts(settings | {"seed": 2})
    assert found[17:] == texts(settings, after=Position(name, 17))


@pytest.mark.parametrize("name", CLASSES)
def test_answers_differ_between_documents_and_places(name):
    """A model that ignores the context cannot have them right."""
    of = source({"name": name})
    answers = [[text[i] for i in of.answers] for text in texts({"name": name, "n_documents": 300})]
    for place in zip(*answers, strict=True):
        most = max(map(place.count, place)) / len(answers)
        assert most < 0.2, "a guess"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "mqar", "n_pairs": 0}, "config data.n_pairs=0: Input should be greater than or equal to 1"),
        (
            {"name": "mqar", "n_pairs": 65},
            "n_pairs=65 is more than the 64 keys of key_letters=1: use at most that, or more letters",
        ),
        ({"name": "mqar", "key_letters": 4}, "config data.key_letters=4: Input should be less than or equal to 3"),
        ({"name": "induction", "length": 1}, "config data.length=1: Input should be greater than or equal to 2"),
        (
            {"name": "selective_copy", "length": 8, "n_letters": 9},
            "n_letters=9 is more than the length=8 of the text: lower it",
        ),
        ({"name": "passkey", "length": 0}, "config data.length=0: Input should be greater than or equal to 1"),
        ({"name": "passkey", "n_documents": 0}, "config data.n_documents=0: Input should be greater than"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_in_one_line(settings, message):
    with pytest.raises(UserError) as error:
        decode(PrepareConfig, {"data": settings, "tokenizer": {"name": "bytes"}, "out_dir": "x"})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_task_is_prepared_as_any_dataset(command, tmp_path):
    out = tmp_path / "mqar"
    line = ["data=mqar", "data.n_pairs=4", "data.n_documents=500", "tokenizer=bytes", f"out_dir={out}", "workers=1"]
    result = command("scripts/prepare_data", *line)
    assert result.status == 0, result.err
    assert command("scripts/verify_dataset", f"dataset_dir={out}").status == 0
    manifest = read_manifest(out)
    assert manifest.set_names == ["mqar"]
    data = json.loads((out / "manifest.json").read_text())["prepared"]["data"]
    documents = {}
    for split in ("train", "val"):
        stream = TokenStream(out, manifest, split)
        windows = EvalBatches(stream, seq_len=17)
        ids, targets = windows.rows(0, len(windows))
        assert (ids[:-1, 16] == 256).all(), "a document is a window"
        documents[split] = [bytes(row[:16].tolist()).decode() for row in ids]
        for text, row in zip(documents[split], targets, strict=True):
            assert {i: chr(row[i - 1]) for i in source(data).answers} == expected(data, text)
    assert not set(documents["train"]) & set(documents["val"])
    assert len(documents["train"]) + len(documents["val"]) == 500
    assert len(documents["val"]) > 5
