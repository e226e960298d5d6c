"""A run saves and reports it after a first stop signal, and can be resumed; a second signal ends it immediately."""

import itertools
import os
import pty
import signal
import threading
import time

import pytest
import ranks
from test_resume import assert_same_run, metrics

import trainer.signals
import trainer.step
from common.exits import AGAIN
from runtime.checkpoint import find_newest, open_checkpoint
from trainer.loop import fit
from trainer.signals import StopSignals

pytestmark = pytest.mark.usefixtures("restored_torch")

# A run that waits for ever in step 3, as in a collective that never ends: Python code never runs again.
STUCK = ranks.IN_STEP.format(when="step == 2", fault="threading.Event().wait()")


@pytest.fixture
def args(tiny_args):
    return [*tiny_args, "runtime.micro_batch=4", "max_steps=100", "checkpoint.every=1000", "eval.every=1000"]


def stopped_after_step_5(rank, number):
    """The code of a run in which a process receives a signal after step 5."""
    return ranks.IN_STEP.format(when=f"(step, rank) == (5, {rank})", fault=f"os.kill(os.getpid(), {int(number)})")


def test_a_signal_ends_the_run_after_its_step_and_the_same_command_goes_on(command, args, tmp_path):
    assert command("train", *args, f"run_dir={tmp_path / 'whole'}").status == 0
    (stopped,) = ranks.run(1, "-c", stopped_after_step_5(0, signal.SIGTERM), *args, status=75)
    step = open_checkpoint(tmp_path / "run").state.step
    assert 5 <= step < 100
    assert metrics(tmp_path / "run")[-1]["step"] == step
    assert f"stopped by SIGTERM: step {step} of 100 is saved" in stopped.out
    assert "a second signal stops at once" in stopped.err
    assert command("train", *args).status == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")


LONG_STEPS = {"batch_tokens": 128, "runtime.micro_batch": 2, "max_steps": 6}  # 4 micro-batches a step


@pytest.fixture
def stopped_at(monkeypatch):
    """Trains until a signal comes in a forward pass, counted from 1."""

    def train(config, number):
        forward = trainer.step.SummedLoss.forward
        calls = itertools.count(1)
        noted = threading.Event()

        def interrupted(*args):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGTERM)
                assert noted.wait(60)
            return forward(*args)

        with monkeypatch.context() as patch:
            patch.setattr(trainer.step.SummedLoss, "forward", interrupted)
            patch.setattr(trainer.signals, "warn", lambda line: noted.set())
            with pytest.raises(SystemExit) as stopped:
                fit(config)
        assert stopped.value.code == AGAIN
        assert next(calls) == number + 1, "no other micro-batch was computed"
        return open_checkpoint(config.run_dir).state

    return train


def test_a_signal_ends_a_long_step_between_its_micro_batches_and_no_bit_changes(tiny, tmp_path, stopped_at):
    config = tiny(LONG_STEPS)
    fit(config.model_copy(update={"run_dir": tmp_path / "whole"}))
    assert stopped_at(config, 2).step == 0
    assert stopped_at(config, 2 * 4 + 2).step == metrics(config.run_dir)[-1]["step"] == 2
    assert stopped_at(config, 1).step == 2
    fit(config)
    assert_same_run(tmp_path / "whole", config.run_dir)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_after_the_same_step(args, tmp_path):
    results = ranks.run(2, "-c", stopped_after_step_5(1, signal.SIGUSR1), *args, status=AGAIN)
    step = find_newest(tmp_path / "run").name
    assert f"another process was asked to stop: step {int(step[5:])} of 100 is saved" in results[0].out


@pytest.mark.slow
def test_a_second_signal_ends_even_a_run_that_hangs(args, tmp_path):
    number = signal.SIGTERM
    log = tmp_path / "run" / "metrics.jsonl"
    with ranks.started(1, "-c", STUCK, *args) as (process,):
        ranks.wait_until(lambda: ranks.lines_in(log) == 2, "2 steps")
        os.kill(process.pid, number)
        time.sleep(0.5)
        assert process.poll() is None, "the first waits for the step"
        for _ in range(120):  # one that comes at the same time as the first is not a second one
            os.kill(process.pid, number)
            time.sleep(0.5)
            if process.poll() is not None:
                break
        (ended,) = ranks.finish(process, seconds=1)
    assert ended.status == 128 + number
    last = f"error: {number.name}, the second signal: stopped at once; steps since the last save "
    last += "(all, if there is none) are lost, and the same command takes them again"
    assert ended.err.splitlines()[-1] == last


AT_TERMINAL = """
import os, runpy, sys
for number in range(3):
    os.dup2(os.open(sys.argv.pop(), os.O_RDWR), number)
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_run_whose_terminal_is_lost_saves(args, tmp_path):
    """Printing fails from then on, and the system sends SIGHUP."""
    ours, theirs = pty.openpty()
    log = tmp_path / "run" / "metrics.jsonl"
    with ranks.started(1, "-c", AT_TERMINAL, *args, "max_steps=100000", *[os.ttyname(theirs)] * 3) as (process,):
        ranks.wait_until(lambda: ranks.lines_in(log) > 5, "5 steps")
        os.close(theirs)
        os.close(ours)
        (stopped,) = ranks.finish(process)
    assert stopped.status == AGAIN
    assert metrics(tmp_path / "run")[-1]["step"] == open_checkpoint(tmp_path / "run").state.step > 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signals_of_one_event_are_one_signal(number):
    with StopSignals() as signals:
        signals._echo_seconds = 60.0  # as long as this machine may take
        for _ in range(3):  # such as a terminal's to the whole group, then the shell's or torchrun's
            os.kill(os.getpid(), number)
    assert signals.received is number
