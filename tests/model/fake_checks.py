"""Checks with every outcome, for tests: their processes find them by name."""

import os
import tempfile
import time
from pathlib import Path

import torch

from model.ops.checks import compare


def passes(device, log="", sleep=0):
    if log:
        time.sleep(sleep)
        with Path(log).open("a") as file:
            file.write("ran\n")


def crashes(device):
    os.abort()


def hangs(device):
    time.sleep(600)


def does_not_compile(device):
    raise RuntimeError("PassManager::run failed\nand many lines of it")


def compiles_a_launcher(device, header="Python.h"):
    """As Triton does for each kernel, without its cache."""
    from triton.runtime.build import _build

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "launcher.c")
        source.write_text(f"#include <{header}>")
        _build("launcher", str(source), folder, [], [], [], [])


def square(x):
    return {"y": x.square()}


def off(x):
    """Wrong by one part in a thousand."""
    return {"y": x.square() * 1.001}


def gradient_off(x):
    return {"y": x.square().detach() + 2.01 * (x - x.detach()) * x.detach()}


class Unsteady:
    """Changes its last bits with every call."""

    calls = 0

    def __call__(self, x):
        self.calls += 1
        return {"y": x.square() * (1 + self.calls * 2.0**-22)}


def compares(device, operator):
    operator = Unsteady() if operator == "Unsteady" else globals()[operator]
    compare("squares", operator, square, {"x": torch.linspace(-1, 1, 100)})
