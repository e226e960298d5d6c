"""Parts of several tasks, joined: the bytes are those of one machine."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_prepare import contents

import data.prepare.encode
import data.prepare.join
import data.prepare.merge
import data.prepare.parts
from common.settings import UserError, decode
from data.prepare.dataset import PrepareConfig, prepare
from data.prepare.encode import Batch, Encoded
from data.prepare.items import Position
from data.prepare.merge import merge
from data.prepare.parts import read_parts, write_part

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def files(tmp_path):
    """Seven files: 400 documents of four sets, many of them twice or more often, some unreadable; an empty file."""
    rng = random.Random(0)
    texts = rng.choices([f"{i} " + "word " * rng.randrange(9) for i in range(300)], k=400)
    lines = [json.dumps({"text": text, "meta": {"pile_set_name": rng.choice("ABCD")}}) for text in texts] + ["{"] * 9
    rng.shuffle(lines)
    for i in range(7):
        content = "\n".join(lines[i::6]) if i < 6 else ""
        (tmp_path / f"{(i + 3) % 7}.jsonl").write_text(content)
    return str(tmp_path / "*.jsonl")


@pytest.fixture
def make(files, tmp_path):
    """Prepares the files, or a task's share of them, into a folder of tmp_path."""

    def prepare_into(folder, **changes):
        raw = {
            "data": {"name": "jsonl", "path": files},
            "tokenizer": {"name": "bytes"},
            "out_dir": str(tmp_path / folder),
            "val_fraction": 0.2,
            "shard_tokens": 700,
            "workers": 1,
        }
        return prepare(decode(PrepareConfig, raw | changes))

    return prepare_into


def test_a_merge_without_a_split_is_refused_and_can_be_repeated(make, tmp_path):
    for i in range(2):
        make("parts", num_tasks=2, task_index=i, val_fraction=1e-9)
    for _ in range(2):
        with pytest.raises(UserError, match=r"none of 400 documents went to 'val' with .*: give a larger val_fraction"):
            merge(tmp_path / "parts", tmp_path / "merged")
        assert not (tmp_path / "merged.partial").exists()


@pytest.fixture
def parts(make, tmp_path):
    """Three parts, without duplicates."""
    for i in range(3):
        make("parts", num_tasks=3, task_index=i, dedup="exact")
    return tmp_path / "parts"


@pytest.mark.parametrize("dedup", ["none", "exact"])
@pytest.mark.parametrize("num_tasks", [2, 3, 7])
def test_merged_bytes_are_those_of_one_machine(make, tmp_path, monkeypatch, dedup, num_tasks):
    monkeypatch.setattr(data.prepare.parts, "_TOKENS_OF_A_PART", 2000)
    whole = make("whole", dedup=dedup)
    for i in reversed(range(num_tasks)):
        make("parts", dedup=dedup, num_tasks=num_tasks, task_index=i, workers=1 + i % 3)
    before = {path: path.read_bytes() for path in (tmp_path / "parts").rglob("*.*")}
    assert merge(tmp_path / "parts", tmp_path / "merged") == whole
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert before == {path: path.read_bytes() for path in (tmp_path / "parts").rglob("*.*")}, "the parts stay"
    assert whole.skipped["malformed JSON"] == 9
    assert (whole.skipped.get("duplicate document", 0) > 50) == (dedup == "exact")
    assert len(whole.splits["train"].shards) > 5


def test_parts_made_by_worker_processes(make, tmp_path, monkeypatch):
    monkeypatch.setattr(data.prepare.encode, "_BATCH_CHARACTERS", 300)  # enough batches for worker processes
    make("whole")
    for i in range(2):
        make("parts", num_tasks=2, task_index=i, workers=2 + i)
    merge(tmp_path / "parts", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")


def test_a_part_may_have_nothing_to_train_on(make, files, tmp_path):
    for name in ("0", "1"):
        (tmp_path / f"{name}.jsonl").write_text("{\n")
    whole = make("whole")
    for i in range(7):
        make("parts", num_tasks=7, task_index=i)
    assert merge(tmp_path / "parts", tmp_path / "merged") == whole
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")


def test_no_parts_have_anything(make, tmp_path):
    for path in tmp_path.glob("*.jsonl"):
        path.write_text("{\n")
    for i in range(2):
        make("parts", num_tasks=2, task_index=i)
    with pytest.raises(UserError, match=r"empty \(7 x malformed JSON, first .*jsonl:1\): write one JSON object a line"):
        merge(tmp_path / "parts", tmp_path / "merged")
    assert not (tmp_path / "merged.partial").exists()


def test_a_merge_does_not_delete_an_unfinished_preparation(make, parts, tmp_path, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(data.prepare.join._Joint, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        make("merged", dedup="exact")
    monkeypatch.undo()
    begun = sorted((tmp_path / "merged.partial").rglob("*"))
    with pytest.raises(UserError, match=r"merged\.partial holds an unfinished preparation: finish it, delete it, or"):
        merge(parts, tmp_path / "merged")
    assert sorted((tmp_path / "merged.partial").rglob("*")) == begun


@pytest.mark.parametrize("copied", [0, 1, 2])
def test_a_merge_that_was_stopped_can_be_started_again(make, parts, tmp_path, monkeypatch, copied):
    make("whole", dedup="exact")
    copy, calls = data.prepare.join._Joint.add, iter(range(copied))

    def stop(*args):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        copy(*args)

    monkeypatch.setattr(data.prepare.join._Joint, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        merge(parts, tmp_path / "merged")
    monkeypatch.setattr(data.prepare.join._Joint, "add", copy)
    merge(parts, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")


def test_a_second_time_is_quick(parts, tmp_path, capsys):
    first = merge(parts, tmp_path / "merged")
    capsys.readouterr()
    assert merge(parts, tmp_path / "merged") == first
    assert "is already prepared with these settings" in capsys.readouterr().out


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda part: flip(part / "part-00000.npz", 400), r"is damaged: .*part-00000\.npz: Bad CRC-32 for file 'ids"),
        (lambda part: os.truncate(part / "part-00000.npz", 5000), r"is damaged: .*part-00000\.npz: File is not a zip"),
        (lambda part: (part / "plan.json").unlink(), r"is damaged: .*plan\.json"),
        (lambda part: (part / "tokenizer.json").write_text("{}"), r"is not a tokenizer"),
        (
            lambda part: (part / "finished").unlink(),
            r"is missing or not finished \(1 of 3 are\): run the command that made the others with task_index=0",
        ),
    ],
)
def test_damaged_parts_are_named_and_leave_nothing(parts, tmp_path, damage, message):
    damage(parts / "task-00000-of-00003")
    with pytest.raises(UserError, match=r"task-00000-of-00003\S* " + message) as error:
        merge(parts, tmp_path / "merged")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "merged").exists()
    assert not (tmp_path / "merged.partial").exists()


def test_parts_of_other_settings(make, parts, tmp_path, rank_file):
    shutil.rmtree(parts / "task-00002-of-00003")
    make("parts", num_tasks=3, task_index=2, dedup="exact", val_fraction=0.3)
    with pytest.raises(
        UserError,
        match=r"task-00002-of-00003 was made with other settings than task-00000-of-00003: "
        r"val_fraction=0\.2 \(now 0\.3\): prepare one of them again",
    ):
        merge(parts, tmp_path / "merged")


def test_parts_of_a_tokenizer_that_changed(make, tmp_path, rank_file):
    ranks = tmp_path / "ranks"
    for i in range(2):
        lines = rank_file.read_bytes().splitlines(keepends=True)
        ranks.write_bytes(b"".join(lines[: len(lines) - i]))
        make("parts", num_tasks=2, task_index=i, tokenizer={"name": "gpt2", "path": str(ranks)})
    with pytest.raises(UserError, match=r"task-00001-of-00002 was made with other .* tokenizer.s ranks="):
        merge(tmp_path / "parts", tmp_path / "merged")


def test_a_part_that_is_missing_is_made_by_what_is_printed(command, files, tmp_path):
    settings = ["data=jsonl", f"data.path='{files}'", "tokenizer=bytes", "val_fraction=0.2", "workers=1"]
    made = ["scripts/prepare_data", *settings, f"out_dir={tmp_path / 'parts'}", "num_tasks=2"]
    assert command(*made, "task_index=0").status == 0
    joined = ["scripts/merge_dataset", f"parts_dir={tmp_path / 'parts'}", f"out_dir={tmp_path / 'merged'}"]
    result = command(*joined)
    option = re.search(r"run the command that made the others with (\S+)", result.err)
    assert command(*made, option[1]).status == 0
    assert command(*joined).status == 0


def test_folders_without_all_parts(parts, tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match=r"nothing holds no task-00000-of-\.\.\.: give the out_dir of"):
        merge(tmp_path / "nothing", tmp_path / "merged")
    shutil.rmtree(parts / "task-00000-of-00003")
    shutil.rmtree(parts / "task-00002-of-00003")
    with pytest.raises(UserError, match=r"task-00000-of-00003 is missing or not finished \(2 of 3 are\): run"):
        merge(parts, tmp_path / "merged")
    (parts / "task-00000-of-00002").mkdir()
    with pytest.raises(UserError, match="holds parts of num_tasks=2 and num_tasks=3: delete one kind"):
        merge(parts, tmp_path / "merged")


def test_a_task_takes_its_own_row_of_files(make, files, tmp_path):
    names = []
    for i in range(3):
        make("parts", num_tasks=3, task_index=i)
        folder = tmp_path / "parts" / f"task-{i:05}-of-00003"
        names += [name for part in read_parts(folder) for name in part.inputs]
    assert names == sorted(names)
    assert len(names) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tasks": 3, "task_index": 3}, "task_index=3 is out of range: give one from 0 to 2"),
        ({"task_index": 1}, "task_index=1 is out of range: give one from 0 to 0"),
        ({"num_tasks": 8}, "num_tasks=8 is more than the input's files, 7: use at most num_tasks=7"),
        ({"num_tasks": 2, "data": {"name": "pile", "path": "x"}}, "num_tasks=2 shares out files, data=pile has none"),
        ({"num_tasks": 0}, "num_tasks=0"),
        ({"task_index": -1}, "task_index=-1"),
    ],
)
def test_shares_that_cannot_be(make, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        make("parts", **changes)
    assert not (tmp_path / "parts").exists()


def test_parts_do_not_go_into_a_dataset(make, tmp_path):
    make("whole")
    with pytest.raises(UserError, match=r"out_dir=.*whole is a dataset: choose another folder for the parts"):
        make("whole", num_tasks=2)
    make("parts", num_tasks=2)
    with pytest.raises(UserError, match="parts exists and is not a dataset: choose another folder"):
        make("parts")


def test_the_command(parts, tmp_path, monkeypatch, command):
    def run_script(parts_dir, out_dir):
        return command("scripts/merge_dataset", f"parts_dir={parts_dir}", f"out_dir={out_dir}")

    status, out, _ = run_script(parts, tmp_path / "merged")
    assert status == 0
    assert f"{tmp_path / 'merged'} is ready" in out
    status, out, err = run_script(tmp_path, tmp_path / "other")
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    monkeypatch.setattr(data.prepare.merge, "find_tasks", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    status, _, err = run_script(parts, tmp_path / "merged")
    assert (status, err) == (130, "error: interrupted; run the same command again to continue\n")


def test_a_flipped_byte_of_a_part_is_an_error_or_changes_nothing(tmp_path):
    items = [Encoded(Position("a", i), "set", 1, 1, bytes(16)) for i in range(3)]
    write_part(tmp_path, 0, iter([Batch(items, np.arange(3, dtype=np.uint16))]))
    content = (tmp_path / "part-00000.npz").read_bytes()

    def read():
        (part,) = read_parts(tmp_path)
        return part.model_dump(), part.entries().tobytes(), part.ids().tobytes()

    whole, refused = read(), 0
    for place in range(len(content)):
        flip(tmp_path / "part-00000.npz", place)
        try:
            assert read() == whole
        except UserError:
            refused += 1
        (tmp_path / "part-00000.npz").write_bytes(content)
    assert refused > len(content) / 2
