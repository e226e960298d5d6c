"""A run that hangs or loses a process says where, and ends with the status that means "start again"."""

import os
import re
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from ranks import finish, free_port, lines_in, run, started, wait_until

from common.exits import AGAIN
from common.settings import UserError
from trainer import distributed
from trainer.deadline import Deadline
from trainer.distributed import join_world

HANG_SECONDS = 2

# Adds numbers until it is stopped; {fault} is carried out where a step begins.
WORKER = """
import os, sys, threading, time
import torch
from trainer.distributed import join_world

if os.environ["WORLD_SIZE"] == "1":
    del os.environ["RANK"]  # as started without a launcher
with join_world(torch.device("cpu"), hang_seconds={hang_seconds}) as world:
    for step in range(1, {steps} + 1):
        world.at(f"step {{step}}: data")
        if step == 80:  # long enough for every process to have said where it is
            open("{folder}/" + str(world.rank), "w").close()
        {fault}
        time.sleep(0.02)
        world.at(f"step {{step}}: loss")
        total = world.sum(torch.ones(1)).item()
        assert total == world.size
"""
FOR_EVER = 10**9


@pytest.fixture
def worker(tmp_path):
    """Builds the worker's command."""

    def build(fault="pass", hang_seconds=HANG_SECONDS, steps=FOR_EVER):
        return ["-c", WORKER.format(folder=tmp_path, fault=fault, hang_seconds=hang_seconds, steps=steps)]

    return build


def all_arrived(folder, size):
    wait_until(lambda: all((folder / str(rank)).exists() for rank in range(size)), "step 80")


def stuck_at(result):
    """The place that a process names when it makes no progress."""
    (line,) = errors_of(result)
    found = re.fullmatch(r"error: rank \d \(pid \d+\) made no progress for \d s at '(.*)': start the same .*", line)
    return found and found[1]


def errors_of(*results):
    return [line for result in results for line in result.err.splitlines() if line.startswith("error: ")]


def test_a_process_alone_that_hangs_names_its_place_and_its_stacks(worker):
    (result,) = run(1, *worker("if step == 25: time.sleep(10**6)", hang_seconds=0.5), status=AGAIN)
    assert stuck_at(result) == "step 25: data", result.err
    assert 'File "<string>", line 13 in <module>' in result.err


def test_every_process_of_a_run_that_hangs_names_its_own_place(worker):
    results = run(3, *worker("if step == 25 and world.rank == 1: time.sleep(10**6)"), status=AGAIN)
    assert stuck_at(results[1]) == "step 25: data"
    for result in (results[0], results[2]):  # or it notices first that another has ended
        (line,) = errors_of(result)
        assert stuck_at(result) == "step 25: loss" or "lost contact with another process (" in line


def test_what_takes_long_says_where_it_is_and_how_long_so_far(monkeypatch, capsys):
    """After 15 seconds in one step; then, a step must last twice as long."""
    places = iter([f"step {step}: forward {i}" for step, last in ((1, 40), (2, 40), (3, 70)) for i in range(last)])

    class Ticks(threading.Event):
        def wait(self, timeout=None):
            deadline.at(place := next(places, "end"))
            return place == "end"

    class Here(threading.Thread):  # the deadline's is run below, and those that print end before the next tick
        def start(self):
            return None if self.name == "deadline" else self.run()

    monkeypatch.setattr("trainer.deadline.threading", SimpleNamespace(Event=Ticks, Thread=Here))
    deadline = Deadline(None)
    deadline._thread.run()
    assert capsys.readouterr().out.splitlines() == [
        "step 1: forward 16, 0:16 so far",
        "step 1: forward 31, 0:31 so far",
        "step 3: forward 61, 1:01 so far",
    ]


@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.slow
def test_a_stopped_process_ends_the_others_even_if_it_hosts_the_store(worker, tmp_path, stopped):
    with started(3, *worker()) as processes:
        all_arrived(tmp_path, 3)
        os.kill(processes[stopped].pid, signal.SIGSTOP)
        others = finish(*(process for process in processes if process is not processes[stopped]), seconds=120)
    for result in others:
        assert result.status == AGAIN, result.err
        assert len(errors_of(result)) == 1


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.slow
def test_a_lost_process_is_one_line_and_not_a_traceback(worker, tmp_path, killed):
    with started(2, *worker(hang_seconds=None)) as processes:
        all_arrived(tmp_path, 2)
        os.kill(processes[killed].pid, signal.SIGKILL)
        (other,) = finish(processes[1 - killed], seconds=120)
    assert other.status == AGAIN, other.err
    (line,) = errors_of(other)
    assert f"rank {1 - killed} lost contact with another process (" in line
    assert "Traceback" not in other.err  # torch's own warnings, which commands silence, are there in a fork


@pytest.mark.parametrize("kind", ["RuntimeError", "torch.distributed.DistBackendError"])
@pytest.mark.slow
def test_other_errors_pass_unchanged(worker, kind):
    for result in run(2, *worker(f"if step == 25: raise {kind}('a bug')"), status=1):
        assert f"{kind}: a bug" in result.err
        assert errors_of(result) == []


# A model in DDP, whose frames an error of the training goes through: what holds connections, and what joins them.
FAILING_TRAIN = """
import os, runpy
from common.settings import UserError
from model.gpt import GPT

summed_loss, calls = GPT.summed_loss, 0

def failing(self, token_ids, targets, *state):
    global calls
    calls += self.config.n_vocab > 64  # not those in which process 0 measures the memory of small models
    if calls == 5 and os.environ["RANK"] == "{failing}":
        {fault}
    return summed_loss(self, token_ids, targets)

GPT.summed_loss = failing
runpy.run_path("train.py", run_name="__main__")
"""
DISK_FULL = "raise UserError('the disk is full')"


@pytest.mark.slow
def test_training_says_where_it_hangs_and_goes_on_when_it_is_started_again(tiny_args, tmp_path):
    args = [*tiny_args, "max_steps=10", f"runtime.hang_seconds={HANG_SECONDS}"]
    train = FAILING_TRAIN.format(failing=1, fault="import time; time.sleep(10**6)")
    results = run(2, "-c", train, *args, status=AGAIN)
    assert stuck_at(results[1]) == "step 5: forward 1 of 1"
    assert "in failing" in results[1].err
    assert f"resuming {tmp_path / 'run'} after step 4" in run(2, "train.py", *args)[0].out
    assert lines_in(tmp_path / "run" / "metrics.jsonl") == 10 + 4  # and evaluations after 3, 6, 9 and 10


@pytest.mark.slow
def test_slow_is_not_hung(worker):
    """Two processes take longer than hang_seconds, in places and for a check, as model/ops/checks.py says."""
    check = "from model.ops import checks; [(time.sleep(0.2), [call() for call in checks.waiting]) for _ in range(15)]"
    places = "for i in range(4 * (step == 25 and world.rank == 1)): time.sleep(0.7); world.at(f'evaluate {i}')"
    results = run(3, *worker(f"{places}\n        if step == 30 and world.rank == 2: {check}", steps=40))
    assert [result.err for result in results] == [""] * 3


def test_the_first_process_keeps_the_store_until_the_others_are_done(worker):
    """Otherwise torch prints a warning of thirty lines in processes that end a little later."""
    later = "if step == 5: world.rank == 0 or time.sleep(1); break"
    assert [result.err for result in run(3, *worker(later))] == [""] * 3


@pytest.mark.slow
def test_suspended_is_not_hung(worker, tmp_path):
    """A scheduler may stop all processes for a while, and lets them go on one after the other."""
    with started(3, *worker(steps=200)) as processes:
        all_arrived(tmp_path, 3)
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        time.sleep(3 * HANG_SECONDS)
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.2)
        results = finish(*processes)
    assert [(result.status, result.err) for result in results] == [(0, "")] * 3


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.slow
def test_a_process_that_has_left_has_as_much_time_as_it_needs(worker, last):
    """For example for its last save: it is not interrupted, and the others do not ask for a restart."""
    last_words = f"if step == 30: world.rank != {last} or (world.leave(), time.sleep(4)); break"
    assert [result.err for result in run(3, *worker(last_words))] == [""] * 3


@pytest.mark.parametrize(("failing", "hang_seconds"), [(0, 60), (1, "null")])
@pytest.mark.slow
def test_an_error_of_one_process_ends_the_others_with_the_same_status(tiny_args, failing, hang_seconds):
    train = FAILING_TRAIN.format(failing=failing, fault=DISK_FULL)
    results = run(3, "-c", train, *tiny_args, f"runtime.hang_seconds={hang_seconds}", status=1)
    for rank, result in enumerate(results):
        (line,) = errors_of(result)
        assert result.err == line + "\n"
        if rank == failing:
            assert line.endswith("the disk is full")
        else:
            assert line == f"error: process {rank} stops: process {failing} ended with an error, see its message"


@pytest.mark.slow
def test_an_error_of_all_processes_is_said_by_all(tiny_args):
    train = FAILING_TRAIN.format(failing=0, fault=DISK_FULL).replace('== "0"', 'in "01"')
    results = run(2, "-c", train, *tiny_args, status=1)
    assert all(errors_of(result)[0].endswith("the disk is full") for result in results)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.slow
def test_where_nothing_closes_connections_the_others_end_all_the_same(worker, failing):
    """A main thread that waits on a GPU cannot notice the failure; here it sleeps instead."""
    fault = f"if step == 25: world.rank != {failing} or sys.exit('mend it'); time.sleep(10**6)"
    for rank, result in enumerate(run(3, *worker(fault, hang_seconds=4), status=1)):
        said = f"error: process {rank} stops: process {failing} ended with an error, see its message"
        assert result.err == ("mend it\n" if rank == failing else said + "\n")


@pytest.mark.slow
def test_an_error_is_told_before_what_one_process_still_has_to_do(worker):
    """The others neither wait for that work nor report a hang, and it is not interrupted."""
    fault = """if step == 25 and world.rank == 0:
            try:
                raise ValueError("mend it")
            except ValueError as error:
                world.leave(error)
                time.sleep(8)
                print("saved")
                raise"""
    results = run(2, *worker(fault), status=1)
    assert results[0].out == "saved\n"
    assert "process 0 ended with an error" in errors_of(results[1])[0]


def test_a_store_that_ends_before_this_process_is_done_with_it_is_no_error(monkeypatch):
    """The process that hosts it may end between two requests of the last one."""

    class Ending:
        def check(self, keys):
            return False

        def add(self, key, amount):
            return amount

        def set(self, key, value):
            raise RuntimeError("Connection reset by peer")

    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    assert Deadline(60.0, rank=1, store=Ending()).stop() is None
    assert errors == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("MASTER_ADDR", "MASTER_ADDR is not set: start with torchrun"),
        ("RANK=x", "^RANK=x in the environment: give a whole number below 2$"),
        ("RANK=2", "^RANK=2 in the environment: give a whole number below 2$"),
        ("WORLD_SIZE=-2", "^WORLD_SIZE=-2 in the environment: give"),
        ("MASTER_PORT=65536", "^MASTER_PORT=65536 in the environment: give a whole number below 65536$"),
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
            join_world(torch.device("cpu"), hang_seconds=5).__enter__()


def test_a_process_that_waits_for_others_says_where(monkeypatch, launched, capsys):
    monkeypatch.setattr(distributed, "_LATE_SECONDS", 0.1)
    launched(2, port := free_port())
    with pytest.raises(SystemExit):
        join_world(torch.device("cpu"), hang_seconds=0.1).__enter__()
    line = f"waiting for the others of 2 processes at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}\n"
    assert capsys.readouterr().err.startswith(line)
