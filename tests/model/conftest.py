"""Kernels that are compiled for a GPU that is not here."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def kernel_resources(run_process):
    """Compiles cases of tests/model/kernel_resources.py in a process; returns a dict for each kernel."""
    pytest.importorskip("triton.backends.nvidia")

    def rows_of(*cases):
        [result] = run_process([Path(__file__).with_name("kernel_resources.py"), *map(json.dumps, cases)])
        assert result.status == 0, result.err
        return [json.loads(line) for line in result.out.splitlines()]

    return rows_of
