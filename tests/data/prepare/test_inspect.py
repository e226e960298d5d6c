import json
import re

import numpy as np
import pytest
import torch
from forged import edit

from data.loader import TrainBatches, open_rows
from data.prepare.dataset import prepare
from data.shards import TokenStream, read_manifest
from trainer.loop import fit
from trainer.step import local_micro_batches


@pytest.fixture
def dataset(config):
    """A dataset of two sets and several shards."""
    prepare(config(shard_tokens=1000))
    return config().out_dir


@pytest.fixture
def inspect(command, dataset):
    """Runs the command on the dataset, which must succeed, and returns what it printed."""

    def run(*arguments):
        result = command("scripts/inspect_dataset", f"dataset_dir={dataset}", *arguments)
        assert result.status == 0, result.err
        return result.out

    return run


def rows(printed):
    """The cells of a table's rows."""
    lines = (re.split(r"\s{2,}", line.strip()) for line in printed.splitlines())
    return [line for line in lines if len(line) > 5 and line[0] not in ("split", "set")]


def number(cell):
    return float(cell.replace(",", ""))


def test_the_table_has_the_manifest_s_counts(inspect, dataset):
    found = {(row[0], row[1]): list(map(number, row[2:])) for row in rows(inspect())}
    splits = read_manifest(dataset).splits
    assert set(found) == {(split, name) for split in ("train", "val") for name in ("A", "B", "all")}
    for (split, name), (documents, tokens, share, n_bytes, rate) in found.items():
        total = splits[split].total
        counts = total if name == "all" else splits[split].sets[name]
        assert (documents, tokens, n_bytes) == (counts.documents, counts.tokens, counts.utf8_bytes)
        assert share == pytest.approx(100 * counts.tokens / total.tokens, abs=0.005)
        assert rate == pytest.approx(counts.tokens / counts.utf8_bytes, abs=5e-4)


@pytest.fixture
def tokens_of(corpus):
    """Turns a table of documents into the tokens of each row, read from the lines of the input that it names."""
    lines = [json.loads(line) for line in corpus.read_text().splitlines()]

    def read(printed):
        found = {}
        for set_name, path, *cells, _ in rows(printed):
            line, part, length, row = [cell.replace(",", "") for cell in cells]
            document = lines[int(line) - 1]
            ids = [*document["text"].encode(), 256]
            begin, end = map(int, part.split(" - "))
            assert (set_name, path, int(length)) == (document["meta"]["pile_set_name"], str(corpus), len(ids))
            found[int(row)] = found.get(int(row), []) + ids[begin:end]
        return [found[row] for row in range(len(found))]

    return read


@pytest.mark.parametrize("mixture", [None, {"A": 3, "B": 0}])
@pytest.mark.usefixtures("restored_torch")
@pytest.mark.slow
def test_provenance_of_a_run(inspect, dataset, tokens_of, tiny, monkeypatch, mixture):
    """The tokens that a run was trained on are those of the documents named."""
    trained = {}

    def recorded(batches, step, *rest):
        trained[step + 1] = local_micro_batches(batches, step, *rest)
        return trained[step + 1]

    monkeypatch.setattr("trainer.loop.local_micro_batches", recorded)
    config = tiny({"dataset_dir": str(dataset), "data.mixture": mixture, "max_steps": 3, "seed": 5})
    fit(config)
    for step in (1, 2, 3):
        expected = [torch.cat([x, y[:, -1:]], dim=1) for x, y in trained[step]]
        assert tokens_of(inspect(f"step={step}", f"run_dir={config.run_dir}")) == torch.cat(expected).tolist()


@pytest.mark.usefixtures("restored_torch")
def test_a_run_and_a_step_are_enough_and_show_the_text(command, dataset, dataset_dir, tiny):
    config = tiny({"dataset_dir": str(dataset), "max_steps": 2})
    fit(config)
    result = command("scripts/inspect_dataset", f"run_dir={config.run_dir}", "step=1")
    assert result.status == 0, result.err
    stream = TokenStream(dataset, read_manifest(dataset), "train")
    ids, targets = TrainBatches(open_rows(stream, config.seq_len), config.batch_size, config.seed).batch(0)
    for row, window in enumerate(np.concatenate([ids, targets[:, -1:]], axis=1).tolist()):
        text = "".join("<|endoftext|>" if i == 256 else chr(i) for i in window)
        assert f"--- row {row}, all of 17 tokens:\n{text}\n" in result.out
    few = command("scripts/inspect_dataset", f"run_dir={config.run_dir}", "step=1", "tokens=3").out
    text = "".join("<|endoftext|>" if i == 256 else chr(i) for i in ids[0, :3].tolist())
    assert f"--- row 0, the first 3 of 17 tokens:\n{text}\n--- row 1" in few
    later = command("scripts/inspect_dataset", f"run_dir={config.run_dir}", "step=5").out
    assert later.startswith("the run's last checkpoint is of step 2: this is what step 5 would read\n")
    edit(dataset / "manifest.json", lambda raw: raw["set_names"].append("C"))
    for options, named in ([], dataset), ([f"dataset_dir={dataset_dir}"], dataset_dir):
        other = command("scripts/inspect_dataset", f"run_dir={config.run_dir}", "step=1", *options)
        assert (
            f"error: {named} is not what {config.run_dir} was trained on: give dataset_dir={dataset}, or" in other.err
        )


def test_what_cannot_be_shown_is_one_line(command, dataset):
    for arguments, named in {
        "step=1": "step needs a run: give run_dir",
        "window=999999": "token 999999 is not in 'train', which has",
    }.items():
        result = command("scripts/inspect_dataset", f"dataset_dir={dataset}", *arguments.split())
        assert result.status != 0, arguments
        assert named in result.err
        assert "Traceback" not in result.err


def test_windows_show_text_and_where_it_is_from(inspect, dataset, corpus, tokens_of):
    printed = inspect("window=0,30", "tokens=40", "split=val")
    first, second = re.split(r"\n(?=  set )", printed)[1:]
    for part, start in ((first, 0), (second, 30)):
        ids = TokenStream(dataset, read_manifest(dataset), "val").read(start, start + 40).tolist()
        assert tokens_of(part) == [ids]
        text = "".join("<|endoftext|>" if i == 256 else chr(i) for i in ids)
        assert text in part
    assert len(re.split(r"\n(?=  set )", inspect("random=3"))) == 4


def test_the_end_of_a_split_ends_its_last_window(inspect, dataset):
    total = read_manifest(dataset).splits["train"].total.tokens
    assert inspect(f"window={total - 1}", "tokens=100").endswith("\n<|endoftext|>\n")
