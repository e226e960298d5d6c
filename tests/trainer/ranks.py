"""The processes of one run, started as srun starts them: each with RANK in its environment, none with a launcher.

They are forks of one process that has imported everything, so that a start does not take seconds. Each has its own
program, threads, pipes and signals.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent


IN_STEP = """
import os, runpy, signal, sys, threading
sys.path.insert(0, os.getcwd())
import trainer.loop
take_step = trainer.loop.take_step
def taking(run, *given, **named):
    step, rank = run.state.step, int(os.environ["RANK"])
    if {when}:
        {fault}
    return take_step(run, *given, **named)
trainer.loop.take_step = taking
runpy.run_path("train.py", run_name="__main__")
"""
"""train.py with a fault of its own after some step: one from outside could come too late."""


class Result(NamedTuple):
    """The exit status and output of a process."""

    status: int
    out: str
    err: str


class Process:
    """A forked process with the needed part of subprocess.Popen's interface."""

    def __init__(self, arguments, environment):
        self._files = [tempfile.TemporaryFile(mode="w+") for _ in range(2)]  # noqa: SIM115 (open as long as the process)
        paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._files]
        request = {"arguments": [str(a) for a in arguments], "environment": environment, "files": paths}
        self.pid = _ask(request)["pid"]
        self.returncode = None

    def poll(self):
        """Its exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = _ask({"wait_for": self.pid})["status"]
        return self.returncode

    def wait(self, seconds):
        """Its exit status and what it wrote."""
        wait_until(lambda: self.poll() is not None, "the end of a process", seconds)
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read())
        return self.returncode, *texts

    def end(self):
        """Kill it, and its children, if it still runs."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait(60)
        for file in self._files:
            file.close()


def free_port():
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def environment():
    """A command's environment in tests: one thread, no GPU, no launcher."""
    mine = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return mine | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}


@contextlib.contextmanager
def started(size, *arguments, **more_environment):
    """Starts `size` processes `python <arguments>` that meet at a free port; none outlives the context."""
    shared = environment() | {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    processes = []
    try:
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(Process(arguments, shared | own | more_environment))
        yield processes
    finally:
        for process in processes:
            process.end()


@contextlib.contextmanager
def alone(*arguments):
    """Starts a process `python <arguments>` that no launcher starts; it does not outlive the context."""
    process = Process(arguments, environment())
    try:
        yield process
    finally:
        process.end()


def run_alone(*arguments):
    """Starts such a process, and waits for its end."""
    with alone(*arguments) as process:
        (end,) = finish(process)
    return end


def finish(*processes, seconds=240):
    """Waits for processes; returns their exit statuses and output."""
    return [Result(*process.wait(seconds)) for process in processes]


def run(size, *arguments, status=0, **more_environment):
    """Starts `size` processes and waits for all of them, which must end with this status."""
    with started(size, *arguments, **more_environment) as processes:
        results = finish(*processes)
    assert [result.status for result in results] == [status] * size, [result.err for result in results]
    return results


def wait_until(happened, what, seconds=240):
    """Polls until something has happened."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.02)


def lines_in(path):
    """How many lines a file has so far."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


@functools.cache
def _server():
    command = [sys.executable, str(Path(__file__).resolve())]
    server = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)
    return server


def _ask(request):
    server = _server()
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


def _serve():
    """Answers requests, one JSON object a line, until there are no more; in a fork, returns its request."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait_for" in request:
            pid, status = os.waitpid(request["wait_for"], os.WNOHANG)
            answer = {"status": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            pid = os.fork()
            if pid == 0:
                return request
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)
    return None


def _become(request):
    """Become the requested process."""
    os.setsid()
    files = [os.open(os.devnull, os.O_RDONLY), *(os.open(path, os.O_RDWR) for path in request["files"])]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    script, *sys.argv[1:] = request["arguments"]
    if script == "-c":
        sys.argv[:] = ["-c", *sys.argv[2:]]
        exec(compile(request["arguments"][1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[0] = script
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch._dynamo  # noqa: F401 (optimizers import it when they are made)

    import cli  # noqa: F401
    import trainer.loop
    import trainer.records.run_records
    from common.console import console
    from common.files import write_atomic

    # Drawing takes longer than a tiny run.
    draw = trainer.records.run_records
    draw.draw_losses = lambda lines, path, *titles: write_atomic(path, b"a picture")
    platform.platform()  # slow once, and then remembered; as is what the first line on the console imports
    console.print(end="")
    gc.collect()
    gc.freeze()  # the children's collections need not look at, and so copy, what is here
    if (asked_for := _serve()) is not None:
        _become(asked_for)
