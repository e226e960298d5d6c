import itertools
import json
import random
import re
import shlex
import shutil
from collections import Counter

import pytest

from common.settings import UserError
from data.prepare.dataset import prepare
from data.prepare.encode import split_hash
from data.shards import TokenStream, read_manifest
from data.tokenizer import load_tokenizer


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def texts(folder, split):
    """The documents of a split, decoded."""
    manifest = read_manifest(folder)
    stream = TokenStream(folder, manifest, split)
    ids = stream.read(0, stream.n_tokens).tolist()
    assert ids[-1] == stream.eot_id
    decoded = load_tokenizer(folder / "tokenizer.json").decode_bytes(ids).decode()
    return decoded.split("<|endoftext|>")[:-1]


def test_every_document_is_in_one_split_and_counted(config, corpus, tmp_path):
    manifest = prepare(config())
    written = [json.loads(line) for line in corpus.read_text().splitlines()]
    out = tmp_path / "out"
    train, val = texts(out, "train"), texts(out, "val")
    assert Counter(train + val) == Counter(record["text"] for record in written)
    assert 5 < len(val) < 50, "about a tenth of 200"
    assert [text for text in (record["text"] for record in written) if text in set(train)] == train, "order is kept"
    for set_name in "AB":
        mine = [record["text"] for record in written if record["meta"]["pile_set_name"] == set_name]
        counts = [split.sets[set_name] for split in manifest.splits.values()]
        assert sum(c.documents for c in counts) == len(mine)
        assert sum(c.utf8_bytes for c in counts) == sum(map(len, mine))
        assert sum(c.tokens for c in counts) == sum(map(len, mine)) + len(mine), "each ended by <|endoftext|>"
    assert manifest == read_manifest(out)
    assert not (tmp_path / "out.partial").exists()


def test_the_split_does_not_depend_on_order_or_company(config, corpus, tmp_path):
    prepare(config())
    lines = corpus.read_text().splitlines()
    random.Random(0).shuffle(lines)
    corpus.write_text("\n".join(lines[:150]))
    prepare(config(out_dir=str(tmp_path / "other")))
    for split in ("train", "val"):
        assert set(texts(tmp_path / "other", split)) < set(texts(tmp_path / "out", split))


def test_a_second_time_is_quick_and_other_settings_are_refused(config, corpus, tmp_path, monkeypatch, capsys):
    jsonl = {"name": "jsonl", "path": str(tmp_path / "*.jsonl")}

    def refused(message, **changes):
        with pytest.raises(UserError, match=rf"holds another dataset \({message}\): choose another out_dir"):
            prepare(config(**{"data": jsonl} | changes))

    first = prepare(config(data=jsonl))
    with monkeypatch.context() as patch:
        patch.setattr("data.prepare.dataset.build_tokenizer", None)
        assert prepare(config(data=jsonl, workers=3)) == first
    assert "is already prepared with these settings" in capsys.readouterr().out
    refused(r"made with val_fraction=0\.1 \(now 0\.2\)", val_fraction=0.2)
    refused(r"made with data\.text_field='text' \(now 'body'\)", data=jsonl | {"text_field": "body"})
    refused(r"made with data\.name='jsonl' \(now 'text'\), data\.path=.*", data={"name": "text", "path": str(tmp_path)})
    for i in range(9):
        shutil.copy(corpus, tmp_path / f"{i}.jsonl")
    refused(rf"made with input\.{tmp_path}/0\.jsonl=None \(now \d+\), .*, and 5 more")


@pytest.mark.parametrize(
    ("name", "message"), [("out", "exists and is not a dataset"), ("out.partial", "holds thesis.t")]
)
def test_a_folder_with_other_things_is_left_alone(config, tmp_path, name, message):
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match=message):
        prepare(config())
    assert contents(tmp_path / name) == {"thesis.txt": b"precious"}


@pytest.mark.parametrize("content", ["", "\n", "{\n"])
def test_an_empty_corpus_leaves_nothing(config, corpus, tmp_path, content):
    corpus.write_text(content)
    with pytest.raises(UserError, match=r"0 documents (left to|is too few)"):
        prepare(config())
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_the_first_tokens_are_for_validation(config, corpus, tmp_path):
    """Wherever spans end."""
    written = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    ends = list(itertools.accumulate(len(text) + 1 for text in written))  # bytes, and <|endoftext|>
    for i, (val_tokens, n_val) in enumerate([(1, 1), (ends[40], 41), (ends[40] + 1, 42), (ends[-2], len(ends) - 1)]):
        settings = {"val_fraction": None, "val_tokens": val_tokens, "out_dir": str(tmp_path / f"out{i}")}
        manifest = prepare(config(**settings, shard_tokens=300))
        assert texts(tmp_path / f"out{i}", "val") == written[:n_val]
        assert texts(tmp_path / f"out{i}", "train") == written[n_val:]
        assert manifest.prepared["val_tokens"] == val_tokens
        assert "val_fraction" not in manifest.prepared
    with pytest.raises(UserError, match=r"went to 'train' with val_tokens=.*give a smaller val_fraction or val_tokens"):
        prepare(config(val_fraction=None, val_tokens=ends[-1]))
    assert not (tmp_path / "out.partial").exists()


def test_one_rule_makes_the_splits(config):
    with pytest.raises(UserError, match=r"val_tokens=5 replaces val_fraction=0\.1: give only one"):
        config(val_tokens=5)


@pytest.mark.parametrize(
    ("texts_given", "val_fraction", "n_val"),
    [
        (range(20), 1e-9, 1),
        (range(20), 0.999_999, "smaller val_fraction"),
        ([1, 1], 0.05, "with other texts"),
        ([1], 0.05, "1 document is too few"),
    ],
)
def test_a_small_corpus_validates_on_whole_documents_and_on_one_at_least(
    config, corpus, tmp_path, texts_given, val_fraction, n_val
):
    given = [f"text {i}" for i in texts_given]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in given))
    if isinstance(n_val, str):
        with pytest.raises(UserError, match=n_val):
            prepare(config(val_fraction=val_fraction))
        return
    assert prepare(config(val_fraction=val_fraction)).splits["val"].total.documents == n_val
    assert sorted(texts(tmp_path / "out", "train") + texts(tmp_path / "out", "val")) == sorted(given)


def test_a_document_that_is_most_of_a_small_corpus_is_not_for_validation(config, corpus, tmp_path):
    texts_of_words = (f"{i} " + "word " * 5000 for i in itertools.count())
    longest = next(text for text in texts_of_words if split_hash(text.encode()) < 0.2)
    short = [f"text {i}" for i in range(30)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in [longest, *short]))
    prepare(config(val_fraction=0.2))
    assert longest in texts(tmp_path / "out", "train")
    assert set(texts(tmp_path / "out", "val")) == {text for text in short if split_hash(text.encode()) < 0.2}


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_file_of_rows_has_the_usual_share_of_its_size(config, corpus, tmp_path, name):
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"text {i}" for i in range(2000)]})
    {"a.csv": rows.to_csv, "a.jsonl": rows.to_json}[name](str(tmp_path / name))
    manifest = prepare(config(data={"name": "hf", "path": str(tmp_path / name)}, val_fraction=None))
    assert 60 < manifest.splits["val"].total.documents < 140, "a twentieth"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "a", }', "malformed JSON, first .*:2: write one JSON object a line"),
        ('{"text": ""}', "empty document, first .*:2: correct them"),
    ],
)
def test_a_corpus_that_is_too_small_says_first_what_was_skipped(config, corpus, line, reason):
    corpus.write_text('{"text": "a"}\n' + f"{line}\n" * 40)
    with pytest.raises(UserError, match=rf"^40 x {reason}.*; 1 document left to train and to validate on"):
        prepare(config())


SCRIPTS = "scripts/inspect_dataset", "train"


def test_training_begins_by_the_command_that_is_printed(command, corpus, tmp_path, monkeypatch):
    options = ["data=jsonl", f"data.path='{corpus}'", "tokenizer=bytes", "val_fraction=0.1", "workers=1"]
    result = command("scripts/prepare_data", *options, f"out_dir={tmp_path / 'out'}")
    assert result.status == 0, result.err
    inspect, train = (re.search(rf"\n  python {script}\.py (.*)", result.out)[1] for script in SCRIPTS)
    assert command(SCRIPTS[0], *shlex.split(inspect)).status == 0
    trained = []
    monkeypatch.setattr("trainer.launch.fit", lambda config: trained.append(config) or 0.0)
    monkeypatch.chdir(tmp_path)
    assert command("train", *shlex.split(train)).status == 0
    assert trained[0].dataset_dir == tmp_path / "out"
