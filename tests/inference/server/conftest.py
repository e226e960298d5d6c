"""What the tests of the server share: tiny models, and the server itself in a separate process."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from texts import BYTES, CHAT, gpt_of

from tools.convert.new_run import begin_run

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def make_gpt():
    """Builds tiny models of bytes in float64, in which batches of any size give the same tokens."""

    def make(attention="log_space", position="log_recurrence", endless=False, **changes):
        gpt = gpt_of(attention=attention, position=position, **changes).double()
        with torch.no_grad():
            gpt.embed.weight.mul_(2 if endless else 20)  # so that some tokens are much likelier than others
            if endless:
                gpt.norm.bias.fill_(1)  # a constant in all that the output layer sees,
                gpt.embed.weight[256] = -10  # by which <|endoftext|> is never likely
        return gpt

    return make


@pytest.fixture(scope="session")
def run_dir(make_gpt, tmp_path_factory):
    """A run named "tiny" with such a model, whose texts do not end by themselves."""
    path = tmp_path_factory.mktemp("runs") / "tiny"
    begin_run(make_gpt(endless=True), BYTES, path, seq_len=16, batch_tokens=16)
    return path


class Server:
    """scripts/serve.py in a process, listening at a free port."""

    def __init__(self, run_dir, *options):
        arguments = [f"checkpoint={run_dir}", "port=0", "runtime.device=cpu", "runtime.dtype=float64", *options]
        self.process = subprocess.Popen(
            [sys.executable, "scripts/serve.py", *arguments],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = []
        for line in self.process.stdout:
            self.said.append(line)
            found = re.search(r"served at (\S+) ", line)
            if found:
                self.url = found[1]
                return
        raise AssertionError(self.process.communicate()[1])

    def end(self, number=signal.SIGTERM):
        """(status, stdout, stderr) after a signal."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=240)
        return self.process.returncode, "".join(self.said) + out, err


@pytest.fixture(scope="session")
def serve(run_dir):
    """Starts servers of that run, and ends them."""
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package, reason="the server's packages are not installed: pip install -e '.[serve]'")
    started = []

    def start(*options, run_dir=run_dir):
        started.append(Server(run_dir, *options))
        return started[-1]

    yield start
    for server in started:
        with server.process as process:
            process.kill()


@pytest.fixture(scope="session")
def chat_gpt(make_gpt):
    """Such a model with markers, which writes any byte, and sometimes a marker."""
    return make_gpt(n_vocab=262, endless=True)


@pytest.fixture(scope="session")
def chat_served(serve, chat_gpt, tmp_path_factory):
    """The server of that model."""
    path = tmp_path_factory.mktemp("runs") / "talker"
    begin_run(chat_gpt, CHAT, path, seq_len=16, batch_tokens=16)
    return serve("max_prompt_tokens=2000", run_dir=path)


@pytest.fixture(scope="session")
def served(serve):
    """The server of most tests, with low limits; SIGTERM stops it at the end."""
    server = serve("max_queue=4", "max_prompt_tokens=2000", "max_tokens=100000")
    yield server
    status, out, err = server.end(signal.SIGTERM)
    assert (status, out.splitlines()[-1], err) == (0, "stopped", "")
