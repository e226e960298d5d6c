"""Verification finds every kind of damage in a dataset, and names the damaged file."""

import random
import shutil

import pytest
from forged import edit

from data.prepare.dataset import prepare_dataset
from data.prepare.verify import verify_dataset
from data.shards import read_manifest


@pytest.fixture
def dataset(config):
    """A dataset of two sets and several shards."""
    prepare_dataset(config(shard_tokens=1000))
    return config().out_dir


def problem(dataset):
    """The only problem there is."""
    (found,) = verify_dataset(dataset)
    assert "\n" not in found
    return found


def test_a_whole_dataset_has_no_problems(dataset):
    assert len(read_manifest(dataset).splits["train"].shards) > 3
    assert verify_dataset(dataset) == []


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_flipped_bit_is_found(dataset, suffix):
    rng = random.Random(0)
    for _ in range(10):
        path = rng.choice(sorted(dataset.glob(f"*{suffix}")))
        whole = path.read_bytes()
        content = bytearray(whole)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        assert problem(dataset).startswith(f"{path} is damaged: its sha256 is")
        path.write_bytes(whole)


@pytest.mark.parametrize("file", ["train-00001.bin", "val-00000.idx"])
@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["missing", "cut by a byte", "longer", "a folder"],
)
def test_missing_and_truncated_files_are_named(dataset, file, change):
    change(dataset / file)
    assert problem(dataset).startswith(f"{dataset / file} ")


@pytest.mark.parametrize(("unit", "suffix"), [("tokens", ".bin"), ("documents", ".idx")])
def test_a_wrong_count_of_a_shard(dataset, unit, suffix):
    def change(raw):
        raw["splits"]["train"]["shards"][0][unit] += 1

    edit(dataset / "manifest.json", change)
    assert problem(dataset).startswith(f"{dataset / 'train-00000'}{suffix} has ")


def test_another_tokenizer(dataset, make_dataset, rank_file):
    other = make_dataset(tokenizer={"name": "gpt2", "path": str(rank_file)})
    shutil.copy(other / "tokenizer.json", dataset)
    assert "tokenizer.json is not the tokenizer of manifest.json: prepare" in problem(dataset)


@pytest.mark.parametrize("file", ["manifest.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, "", "[]", "{}"])
def test_a_manifest_or_a_tokenizer_that_is_none(dataset, file, content):
    (dataset / file).unlink()
    if content is not None:
        (dataset / file).write_text(content)
    assert file in problem(dataset)


def test_the_command(dataset, command):
    result = command("scripts/verify_dataset", f"dataset_dir={dataset}")
    assert result.status == 0
    assert f"{dataset} is whole: 200 documents, " in result.out
    assert result.out.endswith(" sets, 1 input\n")
    (dataset / "train-00001.idx").unlink()
    (dataset / "val-00000.bin").unlink()
    result = command("scripts/verify_dataset", f"dataset_dir={dataset}")
    assert result.status == 1
    assert result.out == ""
    first, second = result.err.splitlines()
    assert first.startswith(f"error: {dataset / 'train-00001.idx'} is missing")
    assert second.startswith(f"error: {dataset / 'val-00000.bin'} is missing")
