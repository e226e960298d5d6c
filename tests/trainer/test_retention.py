"""Which checkpoints are kept, and what becomes of them when the disk is full."""

import contextlib
import os
import random
import shutil
import threading
from types import SimpleNamespace

import pytest
from faults import LimitedFiles, assert_same, is_whole, result, steps_of

from common.settings import UserError
from runtime.checkpoint import CheckpointConfig, checkpoint_path, delete_old_checkpoints
from trainer.loop import fit
from trainer.records.run_records import Records

pytestmark = pytest.mark.usefixtures("restored_torch", "plain")


@pytest.fixture
def before_step(monkeypatch):
    """Calls a function before the n-th step ends, when all earlier saves have ended: before_step(n, what)."""
    calls = {}
    write = Records.write

    def writing(records, line):
        write(records, line)
        if "loss" in line and line["step"] in calls:
            for thread in threading.enumerate():
                if thread.name == "saver":
                    thread.join()
            calls[line["step"]]()

    monkeypatch.setattr(Records, "write", writing)
    return calls.__setitem__


# What is kept


def kept(losses, every, keep_last, keep_every):
    """The definition: the checkpoints that there are after each step, and the best, where all steps are evaluated."""
    there = []
    for step in range(1, len(losses) + 1):
        best = losses.index(min(losses[:step])) + 1
        if best == step or step % every == 0 or step == len(losses):
            there.append(step)
            there = [s for s in there if s in there[-keep_last:] or s == best or (keep_every and s % keep_every == 0)]
        yield list(there), best


@pytest.mark.parametrize("seed", range(3))
def test_the_newest_the_best_and_those_of_every_so_many_steps_are_kept(memory, seed):
    rng = random.Random(seed)
    for number in range(15):
        run_dir = memory / str(number)
        before = []
        policy = {"every": rng.randint(1, 4), "keep_last": rng.randint(1, 4), "keep_every": rng.choice([None, 2, 3, 5])}
        losses = [rng.randint(1, 5) for _ in range(10)]
        for step, (expected, best) in enumerate(kept(losses, **policy), start=1):
            if expected == before:
                continue  # nothing is saved after this step
            checkpoint_path(run_dir, step).mkdir(parents=True)
            (run_dir / "checkpoints" / "step-00000001.tmp").mkdir()
            delete_old_checkpoints(run_dir, SimpleNamespace(step=step, best_step=best), CheckpointConfig(**policy))
            files = {path.name: path.read_text() for path in (run_dir / "checkpoints").iterdir() if path.is_file()}
            assert files == {"latest": f"step-{step:08}\n", "best": f"step-{best:08}\n"}
            assert steps_of(run_dir) == expected
            assert len(list((run_dir / "checkpoints").iterdir())) == len(expected) + 2
            before = expected


def test_a_damaged_checkpoint_is_not_one_of_the_newest_to_keep(quick, capsys):
    """The run goes on from the checkpoint before it, and its next save is at a later step."""
    changes = {"max_steps": 6, "eval.every": 6, "checkpoint": {"every": 2, "keep_last": 2}}
    config = quick({**changes, "stop_at": 5})
    fit(config)
    os.truncate(config.run_dir / "checkpoints" / "step-00000005" / "model.safetensors", 100)
    fit(quick(changes))
    assert "step-00000005/model.safetensors is missing or damaged" in capsys.readouterr().err.replace("\n", "")
    assert steps_of(config.run_dir) == [4, 6]


# A full disk


@pytest.fixture
def long(quick):
    """A run of 6 steps, each saved and none of them deleted, and evaluated at the end alone."""

    def build(**checkpoint):
        return quick({"max_steps": 6, "eval.every": 6, "checkpoint": {"every": 1, "keep_last": 6, **checkpoint}})

    return build


def results_with_room(config):
    fit(config)
    found = result(config.run_dir)
    shutil.rmtree(config.run_dir)
    return found


@pytest.fixture(params=[20_000, 50_000], ids=["no_model", "no_optimizer"])
def disk(request):
    """The disk of the run, where the model's, or the optimizer's file is too large."""
    return LimitedFiles(request.param)


def assert_whole(run_dir, steps):
    assert steps_of(run_dir) == steps
    assert all(is_whole(run_dir, step) for step in steps)
    assert not list(run_dir.glob("checkpoints/*.tmp")), "what there is of the others is in the way"


@pytest.fixture
def expected(long):
    """The results of a run with room for all."""
    return results_with_room(long())


def test_a_full_disk_stops_the_run_and_the_same_command_goes_on(expected, long, disk, before_step):
    config = long()
    before_step(3, lambda: disk.fill())
    with contextlib.closing(disk):
        for _ in range(2):
            with pytest.raises(UserError, match=rf"after step 3 failed \(.*{disk.error}"):
                fit(config)
            assert_whole(config.run_dir, [1, 2])
    before_step(3, disk.close)
    fit(config)
    assert_same(config.run_dir, expected)


def test_if_the_last_save_fails_the_run_has_not_ended_well(long):
    config = long()
    expected = results_with_room(config)
    fit(config.model_copy(update={"stop_at": 5}))
    with contextlib.closing(LimitedFiles(50_000)) as disk:
        disk.fill()
        with pytest.raises(UserError, match="the save after step 6 failed"):
            fit(config)
    assert_whole(config.run_dir, [1, 2, 3, 4, 5])
    fit(config)
    assert_same(config.run_dir, expected)
