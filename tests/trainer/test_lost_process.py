"""A run that loses a process, or waits too long for one, ends with the status that means "start again"."""

import os
import signal
import socket
from datetime import timedelta

import pytest
import torch
from ranks import finish, free_port, lines_in, run, started, wait_until

from common.exits import AGAIN
from common.settings import UserError
from runtime import distributed
from runtime.distributed import join_world

# Adds numbers until it is stopped; {fault} is carried out where a step begins.
WORKER = """
import sys, time
from datetime import timedelta
import torch
from runtime.distributed import join_world

with join_world(torch.device("cpu"), timedelta(seconds={timeout})) as world:
    for step in range(1, {steps} + 1):
        if step == 30:
            open("{folder}/" + str(world.rank), "w").close()
        {fault}
        time.sleep(0.02)
        assert world.sum(torch.ones(1)).item() == world.size
"""
FOR_EVER = 10**9


@pytest.fixture
def worker(tmp_path):
    """Builds the worker's command."""

    def build(fault="pass", timeout=60, steps=FOR_EVER):
        return ["-c", WORKER.format(folder=tmp_path, fault=fault, timeout=timeout, steps=steps)]

    return build


def error_of(result):
    """The only line that a process writes, besides torch's own."""
    (line,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in result.err
    return line


@pytest.mark.parametrize(("lost", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
@pytest.mark.slow
def test_a_process_that_is_gone_or_does_not_answer_ends_the_others_with_a_line(worker, tmp_path, lost, number):
    """Even if it hosts the store."""
    with started(3, *worker(timeout=3)) as processes:
        wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)), "step 30")
        os.kill(processes[lost].pid, number)
        others = finish(*(process for process in processes if process is not processes[lost]), seconds=120)
    for result in others:
        assert result.status == AGAIN, result.err
        assert "lost contact with another process (" in error_of(result)


@pytest.mark.slow
def test_other_errors_pass_unchanged(worker):
    for result in run(2, *worker("if step == 25: raise torch.distributed.DistBackendError('a bug')"), status=1):
        assert "torch.distributed.DistBackendError: a bug" in result.err


def test_the_first_process_keeps_the_store_until_the_others_are_done(worker):
    """Otherwise torch prints a warning of thirty lines in processes that end a little later."""
    later = "if step == 5: world.rank == 0 or time.sleep(1); break"
    assert [result.err for result in run(3, *worker(later))] == [""] * 3


# A model in DDP, whose frames an error of the training goes through: what holds connections, and what joins them.
FAILING_TRAIN = """
import os, runpy, time
from common.settings import UserError
from model.gpt import GPT

summed_loss, calls = GPT.summed_loss, 0

def failing(self, token_ids, targets, *state):
    global calls
    calls += 1
    if calls == 5 and os.environ["RANK"] in "{failing}":
        {fault}
    return summed_loss(self, token_ids, targets)

GPT.summed_loss = failing
runpy.run_path("train.py", run_name="__main__")
"""
DISK_FULL = "raise UserError('the disk is full')"


@pytest.mark.slow
def test_training_that_waits_too_long_goes_on_when_it_is_started_again(tiny_args, tmp_path):
    args = [*tiny_args, "max_steps=10", "runtime.timeout_minutes=0.1"]
    train = FAILING_TRAIN.format(failing=1, fault="time.sleep(10**6)")
    with started(2, "-c", train, *args) as processes:
        (waiting,) = finish(processes[0])
    assert waiting.status == AGAIN
    assert "lost contact with another process (Timed out" in error_of(waiting)
    assert f"resuming {tmp_path / 'run'} after step 4" in run(2, "train.py", *args)[0].out
    assert lines_in(tmp_path / "run" / "metrics.jsonl") == 10 + 4  # and evaluations after 3, 6, 9 and 10


@pytest.mark.parametrize("failing", ["1", "012"])
@pytest.mark.slow
def test_a_process_that_fails_says_why_and_the_others_end_with_its_status(tiny_args, failing):
    train = FAILING_TRAIN.format(failing=failing, fault=DISK_FULL)
    for rank, result in enumerate(run(3, "-c", train, *tiny_args, status=1)):
        line = error_of(result)
        assert result.err == line + "\n"
        if str(rank) in failing:
            assert line.endswith("the disk is full")
        else:
            assert line == f"error: process {rank} stops: process {failing} ended with an error, see its message"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("MASTER_ADDR", "MASTER_ADDR is not set: start with torchrun"),
        ("", "^MASTER_PORT={port} is in use on 127.0.0.1: set another"),
    ],
)
def test_a_wrong_launcher_is_told(monkeypatch, launched, wrong, message):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        launched(2, port)
        name, _, value = wrong.partition("=")
        monkeypatch.delenv(name) if name and not value else monkeypatch.setenv(name or "RANK", value or "0")
        with pytest.raises(UserError, match=message.format(port=port)):
            join_world(torch.device("cpu")).__enter__()


def test_a_process_that_waits_for_others_says_where(monkeypatch, launched, capsys):
    monkeypatch.setattr(distributed, "_LATE_SECONDS", 0.1)
    launched(2, port := free_port())
    with pytest.raises(SystemExit):
        join_world(torch.device("cpu"), timedelta(seconds=0.5)).__enter__()
    line = f"waiting for the others of 2 processes at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}\n"
    assert capsys.readouterr().err.startswith(line)
