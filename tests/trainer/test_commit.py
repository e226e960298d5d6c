"""A run killed at any disk operation resumes when it is started again, with the results of an uninterrupted run."""

import random
import re
import shutil

import pytest
from faults import WRITES, Kill, assert_same, finish, is_whole, kills, last_saved, live, names_given, result, steps_of

from trainer.checkpoint import open_checkpoint


def undisturbed(config, processes=1):
    """The results of an undisturbed run, and its operations."""
    life = finish(config, processes)
    assert steps_of(config.run_dir) == [2, 3], "the best and the newest"
    expected = result(config.run_dir)
    shutil.rmtree(config.run_dir)
    return expected, life.operations


def assert_all_whole(run_dir, why):
    """Every folder with a checkpoint's name is whole, and `latest` and `best` name existing checkpoints."""
    for step in steps_of(run_dir):
        assert is_whole(run_dir, step), f"{why}: step {step}"
    for name in ("latest", "best"):
        pointer = run_dir / "checkpoints" / name
        assert not pointer.exists() or open_checkpoint(pointer), f"{why}: {name}"


def one_of_each_kind(operations, kills, which):
    """Of operations that come in each of the three saves, the first (which=0) or the last (-1)."""
    found = {}
    for kill in kills:
        done = [done for done in operations if done.thread == kill.thread][kill.number - 1]
        found.setdefault((done.thread, done.name, re.sub("[0-9]+", "", done.path)), []).append(kill)
    return [same[which] for same in found.values()]


@pytest.mark.parametrize(
    ("how", "power", "which"),
    [("before", False, 0), ("half", False, -1), ("before", True, -1)],
    ids=["before", "in_a_write", "power_cut"],
)
@pytest.mark.slow
def test_killed_at_every_kind_of_operation(quick, how, power, which):
    config = quick()
    expected, operations = undisturbed(config)
    count = 0
    for kill in one_of_each_kind(operations, kills(operations, how, power), which):
        life = live(config, kill=kill)
        assert life.killed, kill
        why = f"{kill}: {[done for done in life.operations if done.thread == kill.thread][-1]}"
        assert_all_whole(config.run_dir, why)
        assert max(steps_of(config.run_dir), default=0) >= last_saved(life.operations), why
        life = finish(config)
        assert life.err == "", why
        assert_same(config.run_dir, expected, why)
        shutil.rmtree(config.run_dir)
        count += 1
    assert count > {"before": 30, "half": 8}[how], count


def test_what_is_counted_on_is_synced(quick):
    """A checkpoint's files are synced before its rename, and the rename before anything else in its folder."""
    _, operations = undisturbed(quick())
    named = 0
    for thread in ("main", "other"):
        own = [done for done in operations if done.thread == thread]
        for i, _ in names_given(own):
            folder = own[i].path + ".tmp"
            inside = [(when, done) for when, done in enumerate(own[:i]) if done.path.startswith(f"{folder}/")]
            syncs = {done.path: when for when, done in enumerate(own[:i]) if done.name == "fsync"}
            for when, done in inside:
                if done.name in WRITES:
                    assert syncs.get(done.path, -1) > when, f"{done} is not synced"
                elif done.name in ("open", "rename", "replace", "unlink"):
                    assert syncs.get(folder, -1) > when, f"{done}: its folder is not synced"
            saved = {done.path for _, done in inside if done.name == "save_file"}
            assert saved == {f"{folder}/{name}.safetensors" for name in ("model", "optimizer", "random")}
            assert own[i + 1].name == "fsync"
            assert own[i + 1].path == own[i].path.rpartition("/")[0]
            named += 1
    assert named == 3


@pytest.mark.slow
def test_killed_again_and_again(quick):
    """Each life makes some progress, however short it is."""
    expected, operations = undisturbed(quick())
    rng, killed = random.Random(0), 0
    for _ in range(4):
        run_dir, life = quick().run_dir, None
        while life is None or life.killed:
            thread, how = rng.choice(operations).thread, rng.choice(["before", "half"])
            life = live(quick(), kill=Kill(thread, rng.randrange(1, 60), how, power=rng.random() < 0.5))
            killed += life.killed
            assert life.killed or life.finished, life.err
            assert killed < 100
        assert_same(run_dir, expected)
        shutil.rmtree(run_dir)
    assert killed > 4


@pytest.mark.slow
def test_killed_at_some_operations_of_two_processes(quick):
    config = quick({"runtime.micro_batch": 2})
    expected, operations = undisturbed(config, processes=2)
    for kill in list(kills(operations))[::16] + list(kills(operations, "half", power=True))[::10]:
        assert live(config, processes=2, kill=kill).killed
        assert_all_whole(config.run_dir, kill)
        life = finish(config, processes=2)
        assert life.err == "", kill
        assert_same(config.run_dir, expected, kill)
        shutil.rmtree(config.run_dir)


def test_killed_in_a_save(quick):
    """Some of the moments that the tests above try in full."""
    config = quick()
    expected, operations = undisturbed(config)
    for kill in list(kills(operations))[5::40] + list(kills(operations, "half", power=True))[2::12]:
        assert live(config, kill=kill).killed, kill
        assert_all_whole(config.run_dir, kill)
        assert finish(config).err == "", kill
        assert_same(config.run_dir, expected, kill)
        shutil.rmtree(config.run_dir)
