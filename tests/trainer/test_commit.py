"""A run killed at any fsync or rename resumes when it is started again, with the results of an uninterrupted run."""

import shutil

import pytest
from faults import (
    assert_same,
    content,
    finish,
    is_whole,
    kills,
    live,
    names_given,
    put_back,
    record,
    result,
    steps_of,
)

from runtime.checkpoint import open_checkpoint
from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch", "plain")


@pytest.fixture
def undisturbed(quick):
    """The configuration of a run, its results, and the disk that recorded its operations."""
    config = quick()
    disk = record(config)
    assert steps_of(config.run_dir) == [2, 3], "the best and the newest"
    return config, result(config.run_dir), disk


def assert_all_whole(run_dir, why):
    """Every folder with a checkpoint's name is whole, and `latest` and `best` name existing checkpoints."""
    for step in steps_of(run_dir):
        assert is_whole(run_dir, step), f"{why}: step {step}"
    for name in ("latest", "best"):
        pointer = run_dir / "checkpoints" / name
        assert not pointer.exists() or open_checkpoint(pointer), f"{why}: {name}"


def assert_goes_on(config, expected, left, capsys):
    """A run of which a kill left that has lost no checkpoint, and goes on to the same end."""
    put_back(left, config.run_dir)
    assert_all_whole(config.run_dir, left.why)
    assert max(steps_of(config.run_dir), default=0) >= left.saved, left.why
    fit(config)
    assert capsys.readouterr().err == "", left.why
    assert_same(config.run_dir, expected, left.why)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 12])
def test_a_run_goes_on_after_a_kill_or_a_power_cut_at_any_fsync_or_rename(undisturbed, capsys, every):
    config, expected, disk = undisturbed
    assert len(disk.left) > 80
    for left in disk.left[::every]:
        assert_goes_on(config, expected, left, capsys)


def test_a_killed_process_leaves_what_the_recording_says(undisturbed):
    config, expected, disk = undisturbed

    def checkpoints(files):
        return {name: data for name, data in files.items() if name.startswith("checkpoints/") and data is not None}

    recorded = [checkpoints(left.files) for left in disk.left]
    saving = [kill for kill in kills(disk.operations) if kill.thread == "other"]
    for kill in saving[5::24]:
        shutil.rmtree(config.run_dir)
        life = live(config, kill=kill)
        assert life.killed
        assert checkpoints(content(config.run_dir)) in recorded, f"{kill}: {life.operations[-1]}"
    assert finish(config).err == ""
    assert_same(config.run_dir, expected)


def test_what_is_counted_on_is_synced(undisturbed):
    """A checkpoint's files are synced before its rename, and the rename before anything else in its folder."""
    _, _, disk = undisturbed
    own = [done for done in disk.operations if done.thread == "other"]
    for i, _ in names_given(own):
        folder = f"{own[i].path}.tmp"
        synced = {done.path for done in own[:i] if done.name == "fsync"}
        files = {f"{folder}/{name}.safetensors" for name in ("model", "optimizer", "random")}
        assert synced >= {folder, *files}
        assert (own[i + 1].name, own[i + 1].path) == ("fsync", own[i].path.rpartition("/")[0])
    assert len(names_given(own)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_of_which_one_is_killed_go_on(quick, strategy):
    """The main process is killed before an operation, and then the other."""
    config = quick({"runtime.micro_batch": 2, "runtime.strategy": strategy})
    operations = finish(config, processes=2).operations
    expected = result(config.run_dir)
    first = 0 if strategy == "ddp" else 16
    for kill in list(kills(operations))[first::32]:
        shutil.rmtree(config.run_dir)
        assert live(config, processes=2, kill=kill).killed
        assert_all_whole(config.run_dir, kill)
        assert finish(config, processes=2).err == "", kill
        assert_same(config.run_dir, expected, kill)
