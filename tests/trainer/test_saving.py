"""Saving in the background writes the values from when the save began, and hides no error."""

import errno
import threading

import pytest
import ranks
import torch
from safetensors.torch import load_file
from test_resume import assert_same_run

import trainer.saving
from common.lock import owned
from common.settings import UserError
from data.tokenizer import BytesConfig, build_tokenizer
from trainer.checkpoint import checkpoints_dir, open_checkpoint
from trainer.config import CheckpointConfig
from trainer.distributed import World
from trainer.loop import fit
from trainer.metrics import MetricsLog
from trainer.saving import Saver
from trainer.state import TrainState

pytestmark = pytest.mark.usefixtures("restored_torch")


@pytest.fixture
def saver(tmp_path):
    """Makes a saver of a run that has nothing but a log."""
    log = MetricsLog(tmp_path / "metrics.jsonl", resumed_at=0)
    writers = World(torch.device("cpu"))
    yield lambda **config: Saver(
        tmp_path, build_tokenizer(BytesConfig(name="bytes")), CheckpointConfig(**config), log, writers
    )
    log.close()


def state(tiny, step):
    config = tiny()
    names = ("model", "seed", "seq_len", "batch_tokens", "dataset_dir")
    return TrainState(step=step, run_id="x", dataset_fingerprint="", **{name: getattr(config, name) for name in names})


def parts(weight):
    return {"model": {"w": weight}, "optimizer": {}, "random": {}}


@pytest.fixture
def gate(monkeypatch):
    """Holds the writing thread up until it is set."""
    event, write = threading.Event(), trainer.saving.save_checkpoint

    def waiting(*args):
        assert event.wait(60)
        return write(*args)

    monkeypatch.setattr(trainer.saving, "save_checkpoint", waiting)
    yield event
    event.set()


def test_training_goes_on_while_the_weights_of_before_are_written(saver, tiny, tmp_path, gate):
    weight = torch.arange(6.0).view(2, 3).T  # not contiguous
    saver = saver()
    saver.save(parts(weight), state(tiny, 1))  # returns, although nothing can be written
    weight.zero_()
    assert not checkpoints_dir(tmp_path).exists()
    gate.set()
    saver.finish()
    stored = load_file(checkpoints_dir(tmp_path) / "step-00000001" / "model.safetensors")
    assert torch.equal(stored["w"], torch.arange(6.0).view(2, 3).T)


def test_the_next_save_waits_for_the_last(saver, tiny, tmp_path, gate):
    weight = torch.zeros(3)
    saver = saver()
    saver.save(parts(weight), state(tiny, 1))
    second = threading.Thread(target=lambda: saver.save(parts(weight.fill_(2)), state(tiny, 2)))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    gate.set()
    second.join(60)
    saver.finish()
    for step, value in ((1, 0.0), (2, 2.0)):
        stored = load_file(checkpoints_dir(tmp_path) / f"step-0000000{step}" / "model.safetensors")
        assert torch.equal(stored["w"], torch.full((3,), value))


def failing(monkeypatch, error, times):
    write, left = trainer.saving.save_checkpoint, [times]

    def save(*args):
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return write(*args)

    monkeypatch.setattr(trainer.saving, "save_checkpoint", save)


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_stop_is_prompt(tiny, monkeypatch):
    """The run stops right after the failed save, not at the next one, which may be hours away."""
    failing(monkeypatch, FULL, times=1)
    steps = []
    from trainer.run import Run

    step = Run._step
    monkeypatch.setattr(Run, "_step", lambda run: (steps.append(run.step), run.saver.wait(), step(run))[-1])
    with pytest.raises(UserError, match=r"after step 2 failed \(No space left on device\)") as error:
        fit(tiny())
    assert "\n" not in str(error.value)
    assert max(steps) <= 2


def test_continue_goes_on_and_the_next_save_works(tiny, tmp_path, monkeypatch, capsys):
    fit(tiny({"run_dir": tmp_path / "whole", "checkpoint.on_error": "continue"}))
    failing(monkeypatch, FULL, times=1)
    fit(tiny({"checkpoint.on_error": "continue"}))
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    assert "the save after step 2 failed (No space left on device)" in capsys.readouterr().err


def test_the_last_save_must_succeed(tiny, monkeypatch):
    failing(monkeypatch, FULL, times=100)
    with pytest.raises(UserError, match=r"the save after step 6 failed"):
        fit(tiny({"checkpoint.on_error": "continue"}))


def test_what_is_no_matter_of_the_disk_is_raised(tiny, monkeypatch):
    failing(monkeypatch, ZeroDivisionError("a bug"), times=1)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        fit(tiny({"checkpoint.on_error": "continue"}))


@pytest.mark.slow
def test_a_run_has_one_owner(tiny, tiny_args, tmp_path):
    """A second run gets an error that names the owner; a killed owner's lock does not block."""
    args = [*tiny_args, "max_steps=100000", "checkpoint.every=5"]
    log = tmp_path / "run" / "metrics.jsonl"
    with ranks.started(1, "train.py", *args) as (first,):
        ranks.wait_until(lambda: ranks.lines_in(log) > 10, "10 steps")
        before = open_checkpoint(tmp_path / "run").state.run_id
        with pytest.raises(UserError, match=rf"is being trained in by process {first.pid} on .*: wait until") as error:
            fit(tiny())
        assert "\n" not in str(error.value)
        assert first.poll() is None
        first.end()
    fit(tiny({"stop_at": open_checkpoint(tmp_path / "run").state.step + 1, "max_steps": 100_000}))
    assert open_checkpoint(tmp_path / "run").state.run_id == before


def test_two_owners_of_a_file_or_a_folder(tmp_path):
    for path in (tmp_path, tmp_path / "lock"):
        with owned(path, lambda: "taken"), pytest.raises(UserError, match="taken"), owned(path, lambda: "taken"):
            pass
        with owned(path, lambda: "taken"):
            pass
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"), owned(tmp_path / "link", lambda: "taken"):
        pass
    assert not (tmp_path / "elsewhere").exists()


DROPOUT = """
import runpy
from torch.nn.functional import dropout
from model.gpt import GPT
features = GPT.features
GPT.features = lambda self, *args, **kwargs: (dropout((out := features(self, *args, **kwargs))[0], 0.1), out[1])
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_every_process_goes_on_with_its_own_random_numbers(tiny_args, tmp_path):
    args = [*tiny_args, "eval.every=100", "runtime.micro_batch=1"]

    def train(processes, name, *more):
        results = ranks.run(processes, "-c", DROPOUT, *args, f"run_dir={tmp_path / name}", *more)
        assert all(r.status == 0 for r in results), [r.err for r in results]
        return tmp_path / name

    whole = train(2, "whole")
    train(2, "run", "stop_at=3")
    assert_same_run(whole, train(2, "run"))
    states = load_file(checkpoints_dir(whole) / "step-00000006" / "random.safetensors")["states"]
    assert not torch.equal(states[0], states[1]), "no two processes draw the same numbers"
    train(2, "other", "stop_at=3")
    train(1, "other", "stop_at=4")  # more or fewer processes: others than before
    train(2, "other")
