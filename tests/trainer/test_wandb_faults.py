"""Real failures of the real wandb: unreachable, silent, its service killed or stopped. Training ends all the same."""

import contextlib
import os
import signal
import socket
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from ranks import Process, environment

from trainer.metrics import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed"),  # slow to import
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are found as Linux shows them"),
]

STEPS = 150
SLOW = """
import os, runpy, time
from torch.optim.optimizer import register_optimizer_step_pre_hook

def wait_for_wandb(*_):
    if os.path.exists(os.environ["HOME"] + "/wait"):
        time.sleep(0.05)

register_optimizer_step_pre_hook(wait_for_wandb)
runpy.run_path("train.py", run_name="__main__")
"""
PATIENCE = 60.0
"""Seconds after which a process counts as one that hangs; wandb's own limits are longer."""


def wait_for(condition):
    """Wait until `condition` returns a true value, and return it."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)
    return found


def name_of(pid):
    """What a process runs; nothing if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def descendants(pid):
    """The ids of all processes that a process started, and those they started."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found


class Training:
    """A train.py process in mid-run, paused while the test causes a fault, and wandb's service."""

    def __init__(self, process, run_dir):
        self.process, self.run_dir = process, run_dir

    def find_service(self):
        """Stop training when wandb has its first lines, and return the id of wandb's service."""
        wait_for(lambda: any(path.stat().st_size for path in self.run_dir.glob("wandb/offline-run-*/*.wandb")))
        os.kill(self.process.pid, signal.SIGSTOP)
        (self.run_dir.parent / "wait").unlink()
        named = lambda: [pid for pid in descendants(self.process.pid) if "wandb-core" in name_of(pid)]  # noqa: E731
        return wait_for(lambda: len(named()) == 1 and named()[0])

    def go_on(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self):
        """Exit status and both outputs."""
        return self.process.wait(PATIENCE)

    def steps(self):
        return [line["step"] for line in read_metrics(self.run_dir / "metrics.jsonl") if "loss" in line]


@pytest.fixture
def train(tiny_args, tmp_path):
    """Starts train.py with wandb, and kills all of its processes at the end."""
    started = []

    def start(*arguments, mode="offline", finish_seconds=60.0, steps=STEPS, env=None):
        given = {"every": 1, "mode": mode, "finish_seconds": finish_seconds}
        wandb = ["tracker=wandb", *(f"tracker.wandb.{key}={value}" for key, value in given.items())]
        length = [f"max_steps={steps}", "checkpoint.every=100000", "eval.every=100000"]
        if mode == "offline":
            (tmp_path / "wait").touch()
        clean = {key: value for key, value in environment().items() if not key.startswith("WANDB_")}
        process = Process(
            ["-c", SLOW, *tiny_args, *wandb, *length, *arguments], clean | {"HOME": str(tmp_path)} | (env or {})
        )
        started.append(process)
        return Training(process, tmp_path / "run")

    yield start
    for process in started:
        for pid in descendants(process.pid) if process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.end()


@pytest.fixture(params=["refuses", "is silent"])
def server(request):
    """The address of a server that refuses connections, or takes them and never answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody else gets this port
        if request.param == "is silent":
            taken.listen(100)
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_server_that(server, train):
    training = train(mode="online", finish_seconds=1, env={"WANDB_BASE_URL": server, "WANDB_API_KEY": "a" * 40})
    status, _, err = training.end()
    assert status == 0, err
    assert training.steps() == list(range(1, STEPS + 1))
    assert err.count("warning:") == err.count("wandb failed (it did not finish within 1 seconds)") == 1


def test_an_account_that_is_missing_is_one_line_and_nothing_is_asked(train):
    status, out, err = train(mode="online", steps=100, env={"WANDB_BASE_URL": "http://127.0.0.1:1"}).end()
    assert status == 0, err
    assert "wandb failed (UsageError: " in err
    assert (err.count("\n"), err.count("warning:")) == (1, 1)
    assert "wandb" not in out


@pytest.mark.parametrize(
    ("sent", "finish_seconds", "problem"),
    [(signal.SIGKILL, 60, "Error:"), (signal.SIGSTOP, 1, "it did not finish within 1 seconds")],
)
def test_a_service_of_wandb_that_is(sent, finish_seconds, problem, train):
    training = train(finish_seconds=finish_seconds)
    service = training.find_service()
    os.kill(service, sent)
    training.go_on()
    status, _, err = training.end()
    os.kill(service, signal.SIGKILL)
    assert status == 0, err
    assert training.steps() == list(range(1, STEPS + 1))
    assert (err.count("\n"), err.count("warning: wandb failed (")) == (1, 1), err
    assert problem in err
