"""Saving in the background writes the values from when the save began, and hides no error."""

import errno
import threading

import pytest
import ranks
import torch
from safetensors.torch import load_file
from test_resume import assert_same_run

import trainer.checkpoint
from common.lock import owned
from common.settings import UserError
from data.tokenizer import BytesConfig, build_tokenizer
from trainer.checkpoint import CheckpointConfig, Saver, checkpoint_path, open_checkpoint
from trainer.distributed import World
from trainer.loop import fit
from trainer.metrics import MetricsLog
from trainer.state import TrainState

pytestmark = pytest.mark.usefixtures("restored_torch")


@pytest.fixture
def saver(tmp_path):
    """The saver of a run that has nothing but a log."""
    log, config = MetricsLog(tmp_path / "metrics.jsonl", resumed_at=0), CheckpointConfig()
    yield Saver(tmp_path, build_tokenizer(BytesConfig(name="bytes")), config, World(torch.device("cpu")), log, None)
    log.close()


@pytest.fixture
def state(tiny):
    names = ("model", "seed", "seq_len", "batch_tokens", "dataset_dir")
    settings = {name: getattr(tiny(), name) for name in names}
    return TrainState(step=1, run_id="x", dataset_fingerprint="", **settings)


def tensors(weight):
    return {"model": {"w": weight}, "optimizer": {}}


def stored(run_dir, step):
    return load_file(checkpoint_path(run_dir, step) / "model.safetensors")["w"]


@pytest.fixture
def gate(monkeypatch):
    """Holds the writing thread up until it is set."""
    event, write = threading.Event(), trainer.checkpoint.save_checkpoint

    def waiting(*args):
        assert event.wait(60)
        return write(*args)

    monkeypatch.setattr(trainer.checkpoint, "save_checkpoint", waiting)
    yield event
    event.set()


def test_training_goes_on_while_the_weights_of_before_are_written(saver, state, tmp_path, gate):
    weight = torch.arange(6.0).view(2, 3).T  # not contiguous
    saver.save(tensors(weight), state)  # returns, although nothing can be written
    weight.zero_()
    assert not checkpoint_path(tmp_path, 1).parent.exists()
    gate.set()
    saver.finish()
    assert torch.equal(stored(tmp_path, 1), torch.arange(6.0).view(2, 3).T)


def test_the_next_save_waits_for_the_last(saver, state, tmp_path, gate):
    weight, later = torch.zeros(3), state.model_copy(update={"step": 2})
    saver.save(tensors(weight), state)
    second = threading.Thread(target=lambda: saver.save(tensors(weight.fill_(2)), later))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    gate.set()
    second.join(60)
    saver.finish()
    assert [stored(tmp_path, step).tolist() for step in (1, 2)] == [[0] * 3, [2] * 3]


def failing(monkeypatch, error, times):
    write, left = trainer.checkpoint.save_checkpoint, [times]

    def save(*args):
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return write(*args)

    monkeypatch.setattr(trainer.checkpoint, "save_checkpoint", save)


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
    states = load_file(checkpoint_path(whole, 6) / "random.safetensors")["states"]
    assert not torch.equal(states[0], states[1]), "no two processes draw the same numbers"
    train(2, "other", "stop_at=3")
    train(1, "other", "stop_at=4")  # more or fewer processes: others than before
    train(2, "other")
