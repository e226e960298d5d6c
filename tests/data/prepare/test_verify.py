"""Verification finds every kind of damage in a dataset, and names the damaged file."""

import json
import random
import shutil

import pytest
from forged import edit

from data.prepare.dataset import prepare
from data.prepare.verify import verify
from data.shards import read_manifest


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Where the first test leaves its dataset for all others."""
    return tmp_path_factory.mktemp("pristine") / "dataset"


@pytest.fixture
def dataset(config, pristine):
    """A dataset of two sets and several shards."""
    if not pristine.exists():
        prepare(config(shard_tokens=1000))
        config().out_dir.rename(pristine)
    return shutil.copytree(pristine, config().out_dir)


def problem(dataset):
    """The only problem there is."""
    (found,) = verify(dataset)
    assert "\n" not in found
    return found


def change_bytes(path, change):
    """Change a file's content, a bytearray, in place."""
    content = bytearray(path.read_bytes())
    path.write_bytes(change(content) or content)


def test_a_whole_dataset_has_no_problems(dataset):
    assert len(read_manifest(dataset).splits["train"].shards) > 3
    assert verify(dataset) == []


def test_documents_of_multi_byte_tokens(config, rank_file, corpus):
    corpus.write_text("".join(json.dumps({"text": f"there {i} these é 日本\0"}) + "\n" for i in range(100)))
    manifest = prepare(config(tokenizer={"name": "gpt2", "path": str(rank_file)}, shard_tokens=300))
    assert manifest.splits["train"].total.utf8_bytes > manifest.splits["train"].total.tokens
    assert verify(config().out_dir) == []


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_flipped_bit_is_found(dataset, suffix):
    rng = random.Random(0)
    for _ in range(10):
        path = rng.choice(sorted(dataset.glob(f"*{suffix}")))
        place, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)

        def flip(content, place=place, bit=bit):
            content[place] ^= bit

        change_bytes(path, flip)
        assert problem(dataset).startswith(f"{path} is damaged: its sha256 is"), (path, place, bit)
        change_bytes(path, flip)


@pytest.mark.parametrize("file", ["train-00001.bin", "val-00000.idx"])
@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:20]),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["missing", "empty", "cut by a byte", "cut short", "longer", "a folder"],
)
def test_missing_and_truncated_files_are_named(dataset, file, change):
    change(dataset / file)
    assert problem(dataset).startswith(f"{dataset / file} ")


@pytest.mark.parametrize("unit", ["tokens", "documents"])
def test_a_wrong_count_of_a_shard(dataset, unit):
    def change(raw):
        raw["splits"]["train"]["shards"][0][unit] += 1
        raw["splits"]["train"]["shards"][1][unit] -= 1

    edit(dataset / "manifest.json", change)
    suffix = {"tokens": ".bin", "documents": ".idx"}[unit]
    found = verify(dataset)
    assert [line.split()[0] for line in found] == [str(dataset / f"train-0000{i}{suffix}") for i in (0, 1)]


def test_another_tokenizer(dataset, make_dataset, rank_file):
    other = make_dataset(tokenizer={"name": "gpt2", "path": str(rank_file)})
    (dataset / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes())
    assert problem(dataset) == f"{dataset / 'tokenizer.json'} is not the tokenizer of manifest.json: " + (
        "prepare the dataset again"
    )


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
    assert [line.split()[:2] for line in result.err.splitlines()] == [
        ["error:", str(dataset / "train-00001.idx")],
        ["error:", str(dataset / "val-00000.bin")],
    ]
