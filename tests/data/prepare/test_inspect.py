import json
import re

import numpy as np
import pytest

from data.loader import TrainBatches, open_rows
from data.prepare.dataset import prepare_dataset
from data.shards import TokenStream, read_manifest
from trainer.loop import fit


@pytest.fixture
def dataset(config):
    """A dataset of two sets and several shards."""
    prepare_dataset(config(shard_tokens=1000))
    return config().out_dir


@pytest.fixture
def inspect(command, dataset):
    """Runs the command on the dataset, which must succeed, and returns what it printed."""

    def run(*arguments):
        result = command("scripts/inspect_dataset", *arguments)
        assert result.status == 0, result.err
        return result.out

    return run


def rows(printed):
    """The cells of a table's rows."""
    lines = (re.split(r"\s{2,}", line.strip()) for line in printed.splitlines())
    return [line for line in lines if len(line) > 5 and line[0] not in ("split", "set")]


def text_of(ids):
    return "".join("<|endoftext|>" if i == 256 else chr(i) for i in ids)


def test_the_table_has_the_manifest_s_counts(inspect, dataset):
    expected = []
    for name, split in read_manifest(dataset).splits.items():
        largest_first = sorted(split.sets.items(), key=lambda item: -item[1].tokens)
        for set_name, counts in [*largest_first, ("all", split.total)]:
            share = f"{100 * counts.tokens / split.total.tokens:.2f}"
            rate = f"{counts.tokens / counts.utf8_bytes:.3f}"
            amounts = [f"{counts.documents}", f"{counts.tokens:,}", share, f"{counts.utf8_bytes:,}"]
            expected.append([name, set_name, *amounts, rate])
    assert rows(inspect(f"dataset_dir={dataset}")) == expected


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


@pytest.mark.usefixtures("restored_torch")
@pytest.mark.parametrize("mixture", [None, {"A": 3, "B": 0}])
def test_a_run_and_a_step_are_enough_and_show_the_text(
    command, inspect, dataset, dataset_dir, tokens_of, tiny, mixture
):
    settings = {"dataset_dir": str(dataset), "data.mixture": mixture, "max_steps": 2, "seed": 5}
    config = tiny(settings)
    fit(config)
    rows = open_rows(TokenStream(dataset, read_manifest(dataset), "train"), config.seq_len)
    batches = TrainBatches(rows, config.batch_size, config.seed)
    if mixture:
        batches.mix(mixture)
    token_ids, targets = batches.batch(1)
    windows = np.append(token_ids, targets[:, -1:], axis=1).tolist()
    printed = inspect(f"run_dir={config.run_dir}", "step=2")
    assert tokens_of(printed) == windows
    for row, ids in enumerate(windows):
        assert f"--- row {row}, all of 17 tokens:\n{text_of(ids)}\n" in printed
    few = inspect(f"run_dir={config.run_dir}", "step=2", "tokens=3")
    assert f"--- row 0, the first 3 of 17 tokens:\n{text_of(windows[0][:3])}\n--- row 1" in few
    later = inspect(f"run_dir={config.run_dir}", "step=5")
    assert later.startswith("the run's last checkpoint is of step 2: this is what step 5 would read\n")
    other = command("scripts/inspect_dataset", f"run_dir={config.run_dir}", "step=1", f"dataset_dir={dataset_dir}")
    message = f"{dataset_dir} is not what {config.run_dir} was trained on: give dataset_dir={dataset}"
    assert f"error: {message}, or" in other.err


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
    printed = inspect(f"dataset_dir={dataset}", "window=0,30", "tokens=40", "split=val")
    first, second = re.split(r"\n(?=  set )", printed)[1:]
    for part, start in ((first, 0), (second, 30)):
        ids = TokenStream(dataset, read_manifest(dataset), "val").read(start, start + 40).tolist()
        assert tokens_of(part) == [ids]
        assert text_of(ids) in part
    assert len(re.split(r"\n(?=  set )", inspect(f"dataset_dir={dataset}", "random=3"))) == 4


def test_the_end_of_a_split_ends_its_last_window(inspect, dataset):
    total = read_manifest(dataset).splits["train"].total.tokens
    assert inspect(f"dataset_dir={dataset}", f"window={total - 1}", "tokens=100").endswith("\n<|endoftext|>\n")
