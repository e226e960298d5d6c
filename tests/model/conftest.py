"""Kernels that are compiled for a GPU that is not here."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.console import say_once
from model.ops.sparse_attention import attend


@pytest.fixture
def kernel_resources(run_process):
    """Compiles cases of tests/model/kernel_resources.py in a process; returns each one's kernels by name."""
    pytest.importorskip("triton.backends.nvidia")

    def rows_of(capability, *cases):
        script = Path(__file__).with_name("kernel_resources.py")
        [result] = run_process([script, capability, *map(json.dumps, cases)])
        rows = [json.loads(line) for line in result.out.splitlines()]
        if capability == 90:
            assert all(right_for_hopper(row) for case in rows for row in case.values())
        return rows

    return rows_of


def right_for_hopper(row):
    """PTX 8.8 is for ptxas 12.9."""
    return row["wgmma"] == 0 and float(row["ptx"]) >= 8.8


@pytest.fixture
def fake_gpu(monkeypatch):
    """The properties of a GPU that is not here, which can be changed."""
    facts = SimpleNamespace(name="NVIDIA Test", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    say_once.cache_clear()
    return facts


@pytest.fixture
def eager_flex(monkeypatch):
    """torch's module of FlexAttention, without compilation, and on CPUs with its backward pass, which is for GPUs."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attend, "_flex_attention", lambda: (flex.flex_attention, flex.BlockMask))
    return flex
