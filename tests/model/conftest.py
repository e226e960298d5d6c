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
    """Compiles cases of tests/model/kernel_resources.py in a process; returns a dict for each kernel."""
    pytest.importorskip("triton.backends.nvidia")

    def rows_of(*cases):
        [result] = run_process([Path(__file__).with_name("kernel_resources.py"), *map(json.dumps, cases)])
        return [json.loads(line) for line in result.out.splitlines()]

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
