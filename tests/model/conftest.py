"""Kernels that are compiled for a GPU that is not here."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.console import say_once
from model.ops.sparse_attention import attend


@pytest.fixture
def kernel_resources(run_process):
    """Compiles cases of tests/model/kernel_resources.py in a process; returns each one's kernels by name.

    For 9.0, they have no wgmma, and PTX 8.8, which is for ptxas 12.9.
    """
    pytest.importorskip("triton.backends.nvidia")

    def rows_of(capability, *cases):
        script = Path(__file__).with_name("kernel_resources.py")
        [result] = run_process([script, capability, *map(json.dumps, cases)], timeout=600)
        rows = [json.loads(line) for line in result.out.splitlines()]
        for row in itertools.chain(*(kernels.values() for kernels in rows)):
            assert capability != 90 or (row["wgmma"] == 0 and float(row["ptx"]) >= 8.8)
        return rows

    return rows_of


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
