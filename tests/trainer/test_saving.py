"""Saving in the background writes the values from when the save began, and hides no error."""

import threading

import pytest
import ranks
import torch
from safetensors.torch import load_file

import runtime.checkpoint
import trainer.loop
from common.settings import UserError
from data.tokenizers.build import BytesConfig, build_tokenizer
from runtime.checkpoint import CheckpointConfig, Saver, checkpoint_path, open_checkpoint
from runtime.distributed import World
from runtime.state import TrainState
from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch")


@pytest.fixture
def saver(tmp_path):
    """The saver of a run that has nothing but a log."""
    (tmp_path / "metrics.jsonl").touch()
    tokenizer = build_tokenizer(BytesConfig(name="bytes"))
    return Saver(tmp_path, tokenizer, CheckpointConfig(), World(torch.device("cpu")), None)


@pytest.fixture
def state(tiny):
    names = ("model", "seed", "seq_len", "batch_tokens", "data", "dataset_dir")
    settings = {name: getattr(tiny(), name) for name in names}
    return TrainState(step=1, run_id="x", dataset_fingerprint="", **settings)


def tensors(weight):
    return {"model": {"w": weight}, "optimizer": {}}


def stored(run_dir, step):
    return load_file(checkpoint_path(run_dir, step) / "model.safetensors")["w"]


@pytest.fixture
def gate(monkeypatch):
    """Holds the writing thread up until it is set."""
    event = threading.Event()
    write = runtime.checkpoint.save_checkpoint

    def waiting(*args):
        assert event.wait(60)
        return write(*args)

    monkeypatch.setattr(runtime.checkpoint, "save_checkpoint", waiting)
    yield event
    event.set()


def test_training_goes_on_while_the_weights_of_before_are_written(saver, state, tmp_path, gate):
    weight = torch.arange(6.0).view(2, 3).T  # not contiguous
    saver.save(tensors(weight), state)  # returns, although nothing can be written
    weight.zero_()
    assert not checkpoint_path(tmp_path, 1).parent.exists()
    gate.set()
    saver.wait()
    saver.check()
    assert torch.equal(stored(tmp_path, 1), torch.arange(6.0).view(2, 3).T)


def test_the_next_save_waits_for_the_last(saver, state, tmp_path, gate):
    weight = torch.zeros(3)
    later = state.model_copy(update={"step": 2})
    saver.save(tensors(weight), state)
    second = threading.Thread(target=lambda: saver.save(tensors(weight.fill_(2)), later))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    gate.set()
    second.join(60)
    saver.wait()
    saver.check()
    assert [stored(tmp_path, step).tolist() for step in (1, 2)] == [[0] * 3, [2] * 3]


def test_a_failed_save_ends_the_run_before_its_next_step(tiny, monkeypatch):
    """Not at the next save, which may be hours away. test_retention.py has full disks."""

    def fail(*_):
        raise ZeroDivisionError("a bug")

    def step(run, *given, **named):
        steps.append(run.state.step)
        for thread in threading.enumerate():
            if thread.name == "saver":
                thread.join()
        return original(run, *given, **named)

    original = trainer.loop.take_step
    steps = []
    monkeypatch.setattr(runtime.checkpoint, "save_checkpoint", fail)
    monkeypatch.setattr(trainer.loop, "take_step", step)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        fit(tiny())
    assert max(steps) <= 2


@pytest.mark.slow
def test_a_run_has_one_owner(tiny, tiny_args, tmp_path):
    """A second run gets an error that names the owner; a killed owner's lock does not block."""
    args = [*tiny_args, "max_steps=100000", "checkpoint.every=5"]
    log = tmp_path / "run" / "metrics.jsonl"
    with ranks.started(1, "train.py", *args) as (first,):
        ranks.wait_until(lambda: ranks.lines_in(log) > 10, "10 steps")
        before = open_checkpoint(tmp_path / "run").state.run_id
        with pytest.raises(UserError, match=rf"is being trained in by process {first.pid} on .*: wait until"):
            fit(tiny())
        assert first.poll() is None
        first.end()
    fit(tiny({"stop_at": open_checkpoint(tmp_path / "run").state.step + 1, "max_steps": 100_000}))
    assert open_checkpoint(tmp_path / "run").state.run_id == before
