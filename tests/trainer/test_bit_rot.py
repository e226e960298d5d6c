"""Damage on the disk is found and named; the run resumes from an undamaged checkpoint with the same results."""

import os
import random
import shutil

import pytest
from faults import assert_same, finish, result, steps_of
from printed import snapshot

from common.settings import UserError
from runtime.checkpoint import checkpoint_path, open_checkpoint
from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch", "plain")

TENSORS = ["model.safetensors", "optimizer.safetensors", "random.safetensors"]
FILES = ["manifest.json", *TENSORS, "state.json", "tokenizer.json"]


@pytest.fixture
def rng():
    return random.Random(0)


@pytest.fixture
def config(quick):
    """A run of 6 steps, saved after 2, 4 and 6. The run as it is after step 4 is in the folder `start`."""
    config = quick({"max_steps": 6, "checkpoint": {"every": 2, "keep_last": 3}, "eval.every": 2})
    fit(config.model_copy(update={"stop_at": 4}))
    assert sorted(path.name for path in checkpoint_path(config.run_dir, 4).iterdir()) == FILES
    shutil.copytree(config.run_dir, config.run_dir.with_name("start"))
    return config


@pytest.fixture
def expected(config):
    """The results of the run if nothing is damaged."""
    fit(config)
    return result(config.run_dir)


def begin(config):
    """Put the run back to where it is after step 4; the folder of that checkpoint."""
    shutil.rmtree(config.run_dir, ignore_errors=True)
    shutil.copytree(config.run_dir.with_name("start"), config.run_dir)
    assert steps_of(config.run_dir) == [2, 4]
    return checkpoint_path(config.run_dir, 4)


def flip(path, rng):
    """Flip a random bit of a file."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path, rng):
    os.truncate(path, rng.randrange(path.stat().st_size))


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


DAMAGE = [flip, cut, blank, lose, swap]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_passed_over(config, expected, rng, capsys, damage):
    """Every second file: the others have the kinds of damage before and after this one."""
    for name in FILES[DAMAGE.index(damage) % 2 :: 2]:
        damage(begin(config) / name, rng)
        capsys.readouterr()
        fit(config)
        out, err = capsys.readouterr()
        assert err.startswith("warning: "), name
        assert err.count("\n") == 1, err
        # A manifest with another sum speaks ill of another file.
        blamed = "" if damage in (flip, swap) and name == "manifest.json" else name
        assert f"step-00000004/{blamed}" in err
        assert "after step 2\n" in out
        assert_same(config.run_dir, expected, name)


def test_as_many_as_are_damaged_are_passed_over(config, expected, rng, capsys):
    flip(checkpoint_path(config.run_dir, 4) / "random.safetensors", rng)
    flip(checkpoint_path(config.run_dir, 6) / "optimizer.safetensors", rng)
    fit(config)
    out, err = capsys.readouterr()
    assert [line.startswith("warning: ") for line in err.splitlines()] == [True, True]
    assert "after step 2\n" in out
    assert_same(config.run_dir, expected)


def test_two_processes_pass_over_the_same(config, rng):
    finish(config, processes=2)
    expected = result(config.run_dir)
    flip(checkpoint_path(config.run_dir, 6) / "model.safetensors", rng)
    assert "step-00000006/model.safetensors" in finish(config, processes=2).err
    assert_same(config.run_dir, expected)


@pytest.mark.usefixtures("expected")
def test_none_whole_is_an_error_and_nothing_is_touched(config, rng, capsys):
    for step, name in (2, "optimizer.safetensors"), (4, "manifest.json"), (6, "model.safetensors"):
        cut(checkpoint_path(config.run_dir, step) / name, rng)
    before = snapshot(config.run_dir)
    for changes in ({}, {"resume": "never"}, {"max_steps": 9}):
        capsys.readouterr()
        with pytest.raises(UserError, match=rf"none of the 3 checkpoints in {config.run_dir}/checkpoints is whole: "):
            fit(config.model_copy(update=changes))
        assert [line.startswith("warning: ") for line in capsys.readouterr().err.splitlines()] == [True] * 3
        assert snapshot(config.run_dir) == before


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_no_bit_of_what_is_text_can_flip(config, rng, name):
    """A flipped bit in any byte is detected; with the bytes restored, the state is the same."""
    newest = checkpoint_path(config.run_dir, 4)
    before = (newest / name).read_bytes()
    state = open_checkpoint(newest).state
    for i in range(len(before)):
        changed = bytearray(before)
        changed[i] ^= 1 << rng.randrange(8)
        (newest / name).write_bytes(changed)
        with pytest.raises(UserError, match="step-00000004"):
            open_checkpoint(newest)
    (newest / name).write_bytes(before)
    assert open_checkpoint(newest).state == state
