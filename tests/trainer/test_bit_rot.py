"""Damage on the disk is found and named; the run resumes from an undamaged checkpoint with the same results."""

import os
import random
import shutil

import pytest
from faults import assert_same, checkpoint_of, finish, is_whole, kills, last_saved, live, result, steps_of

from common.settings import UserError
from trainer.checkpoint import open_checkpoint

TENSORS = ["model.safetensors", "optimizer.safetensors", "random.safetensors"]
FILES = ["manifest.json", *TENSORS, "state.json", "tokenizer.json"]


@pytest.fixture
def rng():
    return random.Random(0)


@pytest.fixture
def config(quick):
    """A run of 6 steps, saved after 2, 4 and 6."""
    return quick({"max_steps": 6, "checkpoint": {"every": 2, "keep_last": 3}, "eval.every": 2})


@pytest.fixture
def expected(config):
    """The results of the run if nothing is damaged; leaves the run as it is after step 4 in the folder `start`."""
    finish(config)
    expected = result(config.run_dir)
    shutil.rmtree(config.run_dir)
    finish(config.model_copy(update={"stop_at": 4}))
    assert sorted(path.name for path in checkpoint_of(config.run_dir, 4).iterdir()) == FILES
    config.run_dir.rename(config.run_dir.with_name("start"))
    return expected


def begin(config):
    """Put the run back to where it is after step 4; the folder of that checkpoint."""
    shutil.rmtree(config.run_dir, ignore_errors=True)
    shutil.copytree(config.run_dir.with_name("start"), config.run_dir)
    assert steps_of(config.run_dir) == [2, 4]
    return checkpoint_of(config.run_dir, 4)


def flip(path, rng):
    """Flip a random bit of a file."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path, rng):
    os.truncate(path, rng.randrange(path.stat().st_size))


def empty(path, rng):
    os.truncate(path, 0)


def grow(path, rng):
    path.write_bytes(path.read_bytes() + bytes([rng.randrange(256)]))


def blank(path, rng):
    """Zeros, as after a power cut on some file systems."""
    path.write_bytes(bytes(path.stat().st_size))


def lose(path, rng):
    path.unlink()


def swap(path, rng):
    """The same file of an older checkpoint."""
    older = path.parent.with_name("step-00000002") / path.name
    if older.read_bytes() == path.read_bytes():
        return lose(path, rng)  # the tokenizer is the same in all of them
    return shutil.copy(older, path)


@pytest.mark.parametrize("damage", [flip, cut, empty, grow, blank, lose, swap], ids=lambda damage: damage.__name__)
@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(config, expected, rng, damage):
    for name in FILES:
        newest = begin(config)
        damage(newest / name, rng)
        life = finish(config)
        assert life.err.startswith("warning: "), name
        assert life.err.count("\n") == 1, life.err
        # A manifest with another sum speaks ill of another file.
        blamed = "" if damage in (flip, swap) and name == "manifest.json" else name
        assert f"step-00000004/{blamed}" in life.err
        assert "after step 2\n" in life.out, life.out
        assert_same(config.run_dir, expected, name)


def test_a_checkpoint_without_files_is_passed_over(config, expected):
    for path in begin(config).iterdir():
        path.unlink()
    life = finish(config)
    assert life.err.count("\n") == 1
    assert "warning: " in life.err
    assert "step-00000004" in life.err
    assert_same(config.run_dir, expected)


def test_as_many_as_are_damaged_are_passed_over(config, expected, rng):
    begin(config)
    finish(config)
    flip(checkpoint_of(config.run_dir, 4) / "random.safetensors", rng)
    flip(checkpoint_of(config.run_dir, 6) / "optimizer.safetensors", rng)
    life = finish(config)
    assert [line.startswith("warning: ") for line in life.err.splitlines()] == [True, True]
    assert "after step 2\n" in life.out
    assert_same(config.run_dir, expected)


def test_two_processes_pass_over_the_same(config, rng):
    finish(config, processes=2)
    expected = result(config.run_dir)
    for damage in (flip, cut, lose):
        damage(checkpoint_of(config.run_dir, 6) / "model.safetensors", rng)
        life = finish(config, processes=2)
        assert "step-00000006/model.safetensors" in life.err
        assert_same(config.run_dir, expected)


def snapshot(folder):
    """Every file with its content and the time of its last change."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_none_whole_is_an_error_and_nothing_is_touched(config, rng):
    finish(config)
    for step, name in (2, "optimizer.safetensors"), (4, "manifest.json"), (6, "model.safetensors"):
        cut(checkpoint_of(config.run_dir, step) / name, rng)
    before = snapshot(config.run_dir)
    for changes in ({}, {"resume": "never"}, {"max_steps": 9}):
        life = live(config.model_copy(update=changes))
        assert life.statuses == [1]
        *warnings, error = life.err.splitlines()
        assert [line.startswith("warning: ") for line in warnings] == [True] * 3
        assert error.startswith("error: ")
        assert str(config.run_dir) in error
        assert snapshot(config.run_dir) == before


@pytest.mark.slow
def test_killed_while_it_goes_on_a_whole_one_is_left(config, expected, rng):
    """Even if only the newest checkpoint is kept, a whole one is always left."""
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": 1, "keep_last": 1})})

    def damaged():
        flip(begin(config) / "model.safetensors", rng)

    begin(config)
    finish(config)
    expected = result(config.run_dir)
    damaged()
    for kill in list(kills(finish(config).operations))[::7]:
        damaged()
        life = live(config, kill=kill)
        assert life.killed
        whole = [step for step in steps_of(config.run_dir) if is_whole(config.run_dir, step)]
        assert max(whole) >= max(2, last_saved(life.operations)), kill
        finish(config)
        assert_same(config.run_dir, expected, kill)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_no_bit_of_what_is_text_can_flip(config, expected, rng, name):
    """A flipped bit in any byte is detected; with the bytes restored, the state is the same."""
    newest = begin(config)
    before, state = (newest / name).read_bytes(), open_checkpoint(newest).state
    for i in range(len(before)):
        changed = bytearray(before)
        changed[i] ^= 1 << rng.randrange(8)
        (newest / name).write_bytes(changed)
        with pytest.raises(UserError, match="step-00000004"):
            open_checkpoint(newest)
    (newest / name).write_bytes(before)
    assert open_checkpoint(newest).state == state
