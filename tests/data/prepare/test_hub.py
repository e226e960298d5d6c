"""Datasets as the library datasets opens them: from the hub, which tests cannot reach, or from a folder."""

import gzip
import shutil

import pyarrow
import pytest
from pyarrow import parquet

from common.settings import UserError
from data.prepare.dataset import prepare_dataset
from data.prepare.items import Document, Position
from data.prepare.sources import HubSource


@pytest.fixture
def folder(tmp_path):
    """A dataset with two splits, and a second configuration."""
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: web\n  default: true\n  data_files:\n  - {split: train, path: 'train-*'}\n"
        "  - {split: validation, path: 'val-*'}\n- config_name: books\n  data_files: books.parquet\n---\n"
    )
    for name, rows in {"train-0": range(7), "train-1": range(7, 12), "val-0": range(12, 15)}.items():
        table = pyarrow.table({"body": [f"text {i}" for i in rows], "id": list(rows)})
        parquet.write_table(table, folder / f"{name}.parquet", row_group_size=3)
    parquet.write_table(pyarrow.table({"body": [f"book {i}" for i in range(4)]}), folder / "books.parquet")
    return folder


def source(folder, **settings):
    return HubSource(**({"name": "hf", "path": str(folder), "text_field": "body"} | settings))


def texts(source, after=None):
    return [source.parse(raw.content).content for raw in source.documents([*source.inputs()], after=after)]


def test_a_folder_is_read_in_order(folder):
    files = [*source(folder, split="train").inputs()]
    documents = [source(folder).parse(raw.content) for raw in source(folder).documents(files)]
    assert documents == [Document(f"text {i}", "hf") for i in range(12)]
    assert source(folder).val_inputs([]) == [str(folder / "val-0.parquet")]
    assert texts(source(folder, split="validation")) == ["text 12", "text 13", "text 14"]
    assert texts(source(folder, subset="books")) == [f"book {i}" for i in range(4)]


SAVED = ["saved", "splits", "a.parquet", "a.ARROW", "*.parquet", "arrow", "a.csv", "a.csv.gz", "a.jsonl"]


@pytest.mark.parametrize(("path", "first"), [(path, i % 2) for i, path in enumerate(SAVED)])
def test_what_the_library_saves_is_read(tmp_path, path, first):
    """A dataset, one with splits, files, and a folder of them; also after a position."""
    import datasets

    rows = datasets.Dataset.from_dict({"body": ["a", "b", "c"]})
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=rows, test=rows.select([2, 1])).save_to_disk(tmp_path / "splits")
    rows.to_parquet(tmp_path / "a.parquet")
    rows.to_csv(tmp_path / "a.csv")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    rows.to_json(tmp_path / "a.jsonl")
    (tmp_path / "arrow").mkdir()
    for copy in ("a.ARROW", "arrow/a.arrow"):
        shutil.copy(tmp_path / "saved" / "data-00000-of-00001.arrow", tmp_path / copy)
    (name,) = source(tmp_path / path).inputs()
    assert texts(source(tmp_path / path), Position(name, first)) == ["a", "b", "c"][first:]
    if path == "splits":
        assert texts(source(tmp_path / path, split="test")) == ["c", "b"]
        with pytest.raises(UserError, match=r"cannot be read \(Bad split: none\. .*'test'"):
            texts(source(tmp_path / path, split="none"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "no/such/here"}, r"data\.path=no/such/here cannot be read \(.*check the network, data"),
        ({"subset": "films"}, r"cannot be read \(.*'films' not found.*'books'.*: check .*data\.path, data\.subset"),
        ({"split": "test"}, r"cannot be read \(Bad split: test\..*'validation'.*: check .*data\.split"),
    ],
)
def test_what_does_not_exist_is_named(folder, settings, message):
    with pytest.raises(UserError, match=message):
        texts(source(folder, **settings))


def test_a_column_that_is_not_there_is_named(config, folder):
    with pytest.raises(
        UserError, match=r"data\.text_field=text is missing in 15 of the first 15 documents .*:1 with 'body', 'id'\)"
    ):
        prepare_dataset(config(data={"name": "hf", "path": str(folder)}))


ROWS = pyarrow.table({"text": [f"text {i}" for i in range(20)], "id": list(range(20))})
NO_ROWS = ROWS.slice(0, 0)


def write_groups(path, *tables):
    with parquet.ParquetWriter(path, ROWS.schema) as writer:
        for table in tables:
            writer.write_table(table)


PARTS = {  # what the second of three parts is, how many texts it has, and what is counted
    "0 bytes.parquet": (lambda path: path.touch(), 0, "empty file"),
    "0 rows.parquet": (lambda path: write_groups(path, NO_ROWS), 0, "empty file"),
    "cut.parquet": (lambda path: path.write_bytes(path.with_name("a.parquet").read_bytes()[:-9]), 0, "damaged file"),
    "an empty group.parquet": (lambda path: write_groups(path, NO_ROWS, ROWS), 20, None),
    "other ids.parquet": (
        lambda path: parquet.write_table(ROWS.set_column(1, "id", [[{"x": "y"}] * 20]), path),
        20,
        None,
    ),
    "0 bytes.csv": (lambda path: path.touch(), 0, "empty file"),
    "0 rows.csv": (lambda path: path.write_text("text,id\n"), 0, "empty file"),
    "other ids.csv": (lambda path: path.write_text("text,id\n" + "a text,x\n" * 20), 20, None),
}


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_read_alone(config, tmp_path, part):
    write, n_texts, reason = PARTS[part]
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a", "z"):
        if part.endswith("csv"):
            (folder / f"{name}.csv").write_text("text,id\n" + "".join(f"{name} {i},{i}\n" for i in range(20)))
        else:
            parquet.write_table(ROWS, folder / f"{name}.parquet")
    write(folder / part)
    data = {"name": "hf", "path": str(folder)}
    manifest = prepare_dataset(config(data=data))
    assert manifest.skipped == ({reason: 1} if reason else {})
    assert sum(split.total.documents for split in manifest.splits.values()) == 40 + n_texts
    if reason:
        with pytest.raises(UserError, match=rf"in/{part}:1.*: {reason}: correct it; or skip"):
            prepare_dataset(config(data=data, on_error="stop", out_dir=str(tmp_path / "stopped")))
