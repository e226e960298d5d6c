"""Tests for GPUs pass on the simulated one, which notices what a GPU would refuse."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")]


def python(*arguments):
    environment = os.environ | {"SIMULATED_GPU": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_every_mechanism_and_training_run_there():
    files = ["tests/test_gpu.py", "tests/model/test_linear_attention.py", "tests/model/test_attention_contract.py"]
    chosen = "(trains_as and not log_space) or pieces_through or model_of_every_mechanism"
    done = python("-m", "pytest", "-p", "no:xdist", "-m", "gpu", "-k", chosen, *files)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


REFUSED = """
import simulated_gpu, torch
simulated_gpu.begin()
torch.use_deterministic_algorithms(True)
x = torch.ones(2, 2, device="cuda", requires_grad=True)
(x * 2).sum().backward()
assert x.grad.is_cuda and x.grad.cpu().tolist() == [[2, 2], [2, 2]]
for refused in (lambda: x @ torch.ones(2, 2), lambda: x + x.cpu(), lambda: x.detach().numpy(), lambda: x.cumsum(0)):
    try:
        refused()
    except RuntimeError:
        print("refused")
"""


def test_what_a_gpu_refuses_is_refused():
    done = python("-c", REFUSED)
    assert (done.returncode, done.stdout.split()) == (0, ["refused"] * 4), done.stderr
