"""Real failures of the real wandb: unreachable, silent, killed, stopped. Training ends as if nothing had happened."""

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
    """A train.py process in mid-run, paused while the test causes a fault, and wandb's processes."""

    def __init__(self, process, run_dir):
        self.process, self.run_dir = process, run_dir

    def find_wandb(self):
        """Stop training after its first lines; when wandb is under way: the ids of its process, and its service."""
        wait_for(
            lambda: (self.run_dir / "metrics.jsonl").exists() and any(read_metrics(self.run_dir / "metrics.jsonl"))
        )
        os.kill(self.process.pid, signal.SIGSTOP)
        wait_for(lambda: any(path.stat().st_size for path in self.run_dir.glob("wandb/offline-run-*/*.wandb")))
        return self._only("trainer.trackers"), self._only("wandb-core")

    def _only(self, name):
        """The id of the process with this name; while it is being started there can be two."""
        named = lambda: [pid for pid in descendants(self.process.pid) if name in name_of(pid)]  # noqa: E731
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
        clean = {key: value for key, value in environment().items() if not key.startswith("WANDB_")}
        process = Process(
            ["train.py", *tiny_args, *wandb, *length, *arguments], clean | {"HOME": str(tmp_path)} | (env or {})
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


def assert_gone(*pids):
    """They end; a process that has ended and that nobody has asked about runs nothing."""
    for pid in pids:
        wait_for(lambda pid=pid: not name_of(pid))


def test_a_server_that(server, train):
    training = train(mode="online", finish_seconds=1, env={"WANDB_BASE_URL": server, "WANDB_API_KEY": "a" * 40})
    pids = wait_for(lambda: [pid for pid in descendants(training.process.pid) if "wandb-core" in name_of(pid)])
    status, _, err = training.end()
    assert status == 0, err
    assert training.steps() == list(range(1, STEPS + 1))
    assert err.count("warning:") == err.count("wandb failed (it did not finish within 1 seconds)") == 1
    assert_gone(*pids)


def test_an_account_that_is_missing_is_one_line_and_nothing_is_asked(train):
    status, out, err = train(mode="online", steps=100, env={"WANDB_BASE_URL": "http://127.0.0.1:1"}).end()
    assert status == 0, err
    assert "wandb failed (UsageError: " in err
    assert (err.count("\n"), err.count("warning:")) == (1, 1)
    assert "wandb" not in out


@pytest.mark.parametrize(
    ("whose", "sent", "finish_seconds", "problem"),
    [
        ("service", signal.SIGKILL, 60, "Error:"),
        ("service", signal.SIGSTOP, 1, "it did not finish within 1 seconds"),
        ("own", signal.SIGKILL, 60, "its process ended with status -9"),
        ("own", signal.SIGSTOP, 1, "it did not finish within 1 seconds"),
    ],
)
def test_a_process_of_wandb_that_is(whose, sent, finish_seconds, problem, train):
    training = train(finish_seconds=finish_seconds)
    own, service = training.find_wandb()
    os.kill({"own": own, "service": service}[whose], sent)
    training.go_on()
    status, _, err = training.end()
    assert status == 0, err
    assert training.steps() == list(range(1, STEPS + 1))
    assert (err.count("\n"), err.count("warning: wandb failed (")) == (1, 1), err
    assert problem in err
    assert_gone(own, service)


def test_signals_that_a_job_gets_do_not_end_wandb(train):
    """Job schedulers signal every process; wandb is needed until training has saved."""
    training = train()
    own, _ = training.find_wandb()
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(own, sent)
    training.go_on()
    status, _, err = training.end()
    assert (status, err) == (0, "")
    (stored,) = training.run_dir.glob("wandb/offline-run-*/*.wandb")
    (*_, last) = (line for line in read_metrics(training.run_dir / "metrics.jsonl") if "loss" in line)
    assert last["step"] == STEPS
    assert repr(last["loss"]).encode() in stored.read_bytes()


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_trainer_that_is_killed_leaves_nothing_of_wandb(state, train):
    training = train(finish_seconds=1)
    own, service = training.find_wandb()
    if state == "stopped":
        os.kill(service, signal.SIGSTOP)
    os.kill(training.process.pid, signal.SIGKILL)
    assert training.end()[0] == -signal.SIGKILL
    assert_gone(own, service)
