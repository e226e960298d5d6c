import itertools
import json
import random
import re
import shlex
import shutil
from collections import Counter

import pytest

from common.settings import UserError
from data.prepare.dataset import prepare_dataset
from data.prepare.encode import hash_document
from data.shards import Counts, TokenStream, read_manifest, sum_counts
from data.tokenizers.build import load_tokenizer


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def texts(folder, split):
    """The documents of a split, decoded."""
    stream = TokenStream(folder, read_manifest(folder), split)
    ids = stream.read(0, stream.n_tokens).tolist()
    assert ids[-1] == stream.eot_id
    decoded = load_tokenizer(folder / "tokenizer.json").decode_bytes(ids).decode()
    return decoded.split("<|endoftext|>")[:-1]


def write_texts(path, given):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in given))


def test_every_document_is_in_one_split_and_counted(config, corpus, tmp_path):
    manifest = prepare_dataset(config())
    out = tmp_path / "out"
    assert manifest == read_manifest(out)
    assert not (tmp_path / "out.partial").exists()
    records = [json.loads(line) for line in corpus.read_text().splitlines()]
    written = [record["text"] for record in records]
    train = texts(out, "train")
    val = texts(out, "val")
    assert Counter(train + val) == Counter(written)
    assert 5 < len(val) < 50, "about a tenth of 200"
    assert [text for text in written if text in set(train)] == train, "order is kept"
    for set_name in "AB":
        chosen = [each for each in records if each["meta"]["pile_set_name"] == set_name]
        n = len(chosen)
        n_bytes = sum(len(record["text"]) for record in chosen)
        counts = sum_counts(split.sets[set_name] for split in manifest.splits.values())
        assert counts == Counts(tokens=n_bytes + n, documents=n, utf8_bytes=n_bytes)


def test_the_split_does_not_depend_on_order_or_company(config, corpus, tmp_path):
    prepare_dataset(config())
    lines = corpus.read_text().splitlines()
    random.Random(0).shuffle(lines)
    corpus.write_text("\n".join(lines[:150]))
    prepare_dataset(config(out_dir=str(tmp_path / "other")))
    for split in ("train", "val"):
        assert set(texts(tmp_path / "other", split)) < set(texts(tmp_path / "out", split))


def test_a_second_time_is_quick_and_other_settings_are_refused(config, corpus, tmp_path, monkeypatch, capsys):
    jsonl = {"name": "jsonl", "path": str(tmp_path / "*.jsonl")}
    text = {"name": "text", "path": str(tmp_path)}

    def refused(message, **changes):
        message = rf"holds another dataset \(made with {message}\): choose another out_dir"
        with pytest.raises(UserError, match=message):
            prepare_dataset(config(**{"data": jsonl} | changes))

    first = prepare_dataset(config(data=jsonl))
    with monkeypatch.context() as patch:
        patch.setattr("data.prepare.dataset.build_tokenizer", None)
        assert prepare_dataset(config(data=jsonl, workers=3)) == first
    assert "is already prepared with these settings" in capsys.readouterr().out
    refused(r"val_fraction=0\.1 \(now 0\.2\)", val_fraction=0.2)
    body = jsonl | {"text_field": "body"}
    refused(r"data\.text_field='text' \(now 'body'\)", data=body)
    refused(r"data\.name='jsonl' \(now 'text'\), data\.path=.*", data=text)
    for i in range(9):
        shutil.copy(corpus, tmp_path / f"{i}.jsonl")
    refused(rf"input\.{tmp_path}/0\.jsonl=None \(now \d+\), .*, and 5 more")


@pytest.mark.parametrize(
    ("name", "message"),
    [("out", "exists and is not a dataset"), ("out.partial", "holds thesis.t")],
)
def test_a_folder_with_other_things_is_left_alone(config, tmp_path, name, message):
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match=message):
        prepare_dataset(config())
    assert contents(tmp_path / name) == {"thesis.txt": b"precious"}


@pytest.mark.parametrize("content", ["", "\n", "{\n"])
def test_an_empty_corpus_leaves_nothing(config, corpus, tmp_path, content):
    corpus.write_text(content)
    with pytest.raises(UserError, match=r"0 documents (left to|is too few)"):
        prepare_dataset(config())
    assert [*tmp_path.iterdir()] == [corpus]


def test_the_first_tokens_are_for_validation(config, corpus, tmp_path):
    """Wherever spans end."""
    written = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    ends = list(itertools.accumulate(len(text) + 1 for text in written))
    for val_tokens, n_val in [(1, 1), (ends[40], 41), (ends[40] + 1, 42), (ends[-2], 199)]:
        out = tmp_path / f"out{n_val}"
        changes = {"val_fraction": None, "val_tokens": val_tokens, "shard_tokens": 300}
        manifest = prepare_dataset(config(**changes, out_dir=str(out)))
        assert texts(out, "val") == written[:n_val]
        assert texts(out, "train") == written[n_val:]
        assert manifest.prepared["val_tokens"] == val_tokens
        assert "val_fraction" not in manifest.prepared
    message = r"went to 'train' with val_tokens=.*give a smaller val_fraction or val_tokens"
    with pytest.raises(UserError, match=message):
        prepare_dataset(config(val_fraction=None, val_tokens=ends[-1]))
    assert not (tmp_path / "out.partial").exists()
    with pytest.raises(UserError, match=r"val_tokens=5 replaces val_fraction=0\.1: give only one"):
        config(val_tokens=5)


@pytest.mark.parametrize(
    ("numbers", "val_fraction", "message"),
    [
        (range(20), 0.999_999, "smaller val_fraction"),
        ([1, 1], 0.05, "with other texts"),
        ([1], 0.05, "1 document is too few"),
    ],
)
def test_a_corpus_too_small_to_split_is_refused(config, corpus, numbers, val_fraction, message):
    write_texts(corpus, [f"text {i}" for i in numbers])
    with pytest.raises(UserError, match=message):
        prepare_dataset(config(val_fraction=val_fraction))


def test_a_small_corpus_validates_on_whole_documents_and_on_one_at_least(config, corpus, tmp_path):
    given = [f"text {i}" for i in range(20)]
    write_texts(corpus, given)
    prepare_dataset(config(val_fraction=1e-9))
    assert len(texts(tmp_path / "out", "val")) == 1
    assert sorted(texts(tmp_path / "out", "train") + texts(tmp_path / "out", "val")) == sorted(given)


def test_a_document_that_is_most_of_a_small_corpus_is_not_for_validation(config, corpus, tmp_path):
    long_texts = (f"{i} " + "word " * 5000 for i in itertools.count())
    longest = next(text for text in long_texts if hash_document(text.encode()) < 0.2)
    short = [f"text {i}" for i in range(30)]
    write_texts(corpus, [longest, *short])
    prepare_dataset(config(val_fraction=0.2))
    assert longest in texts(tmp_path / "out", "train")
    chosen = [text for text in short if hash_document(text.encode()) < 0.2]
    assert texts(tmp_path / "out", "val") == chosen


def test_a_small_file_has_the_share_of_small_inputs(config, tmp_path):
    (tmp_path / "a.csv").write_text("text\n" + "".join(f"text {i}\n" for i in range(2000)))
    data = {"name": "hf", "path": str(tmp_path / "a.csv")}
    manifest = prepare_dataset(config(data=data, val_fraction=None))
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
    message = rf"^40 x {reason}.*; 1 document left to train and to validate on"
    with pytest.raises(UserError, match=message):
        prepare_dataset(config())


def test_training_begins_by_the_command_that_is_printed(command, corpus, tmp_path, monkeypatch):
    out = tmp_path / "out"
    options = ["data=jsonl", f"data.path='{corpus}'", "tokenizer=bytes", "val_fraction=0.1"]
    result = command("scripts/prepare_data", *options, "workers=1", f"out_dir={out}")
    assert result.status == 0, result.err
    inspect, train = re.findall(r"\n  python \S+ (.*)", result.out)
    assert command("scripts/inspect_dataset", *shlex.split(inspect)).status == 0
    trained = []
    monkeypatch.setattr("trainer.launch.fit", lambda config: trained.append(config) or 0.0)
    monkeypatch.chdir(tmp_path)
    assert command("train", *shlex.split(train)).status == 0
    assert trained[0].dataset_dir == out
