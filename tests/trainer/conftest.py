"""Fixtures for tests of runs that are killed, or whose steps go wrong."""

import functools
import math

import pytest
import ranks
from torch.optim.optimizer import register_optimizer_step_pre_hook

import trainer.loop
import trainer.step


@pytest.fixture
def quick(tiny, memory):
    """Builds a TrainConfig of a run in memory of 3 quick steps, each saved; its best checkpoint is that of step 2."""

    def build(changes=None):
        settings = {
            "run_dir": memory / "run",
            "max_steps": 3,
            "schedule": {"name": "constant", "warmup_steps": 1},
            "model.attention": {"name": "softmax"},
            "model.position": {"name": "learned", "max_len": 16},
            "runtime.micro_batch": 4,
            "optim.max_lr": 0.25,
            "checkpoint": {"every": 1, "keep_last": 1},
            "eval": {"every": 1, "batches": 1},
        }
        return tiny(settings | (changes or {}))

    return build


@pytest.fixture
def train_in_processes(tiny_args, tmp_path):
    """Trains with train.py in some processes, in float64; returns the run directory."""

    def run(name, processes, *options):
        args = [*tiny_args, "runtime.dtype=float64", f"run_dir={tmp_path / name}"]
        ranks.run(processes, "train.py", *args, *options)
        return tmp_path / name

    return run


@pytest.fixture
def launched(monkeypatch):
    """Makes this process the first of several that a launcher has started."""

    def launch(processes, port):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in ({"RANK": "0", "WORLD_SIZE": str(processes)} | address).items():
            monkeypatch.setenv(name, value)

    return launch


@pytest.fixture
def plain(monkeypatch):
    """Runs in this process have one name, draw random numbers in each step, and no pictures, which take long."""
    from faults import draw

    monkeypatch.setattr("trainer.records.run_records.draw_losses", lambda *_, **__: None)
    monkeypatch.setattr("trainer.records.run_dir.git_commit", lambda: None)
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 2 * n)
    hook = register_optimizer_step_pre_hook(functools.partial(draw, 1))
    yield
    hook.remove()


@pytest.fixture
def factor_at(monkeypatch):
    """Multiplies the loss of some steps, counted from 1, by a factor; each as often as it comes, or `times` times."""

    def inject(factors, times=math.inf):
        left = dict.fromkeys(factors, times)
        now = {"factor": 1.0}
        take_step = trainer.loop.take_step
        forward = trainer.step.SummedLoss.forward

        def taking(run, *given, **named):
            step = run.state.step + 1
            hit = left.get(step, 0) > 0
            if hit:
                left[step] -= 1
            now["factor"] = factors[step] if hit else 1.0
            return take_step(run, *given, **named)

        monkeypatch.setattr(trainer.loop, "take_step", taking)
        monkeypatch.setattr(trainer.step.SummedLoss, "forward", lambda *args: forward(*args) * now["factor"])

    return inject
