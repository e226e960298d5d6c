"""The choice between kernels and plain torch, and the compilation of kernels for GPUs that are not here."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import agreement
import pytest
import torch
from made_on import suspended

from model.ops import triton_launch
from model.ops.log_attention import LINEAR, LOG_SPACE, SIGNED

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_what_is_slow_to_import_is_imported_when_it_is_used():
    slow = ["torch._dynamo", "torch.distributed.tensor", "sympy", "datasets"]
    slow.append("model.ops.log_attention.triton_attention")
    code = f"import sys, inference.sample, trainer.loop; sys.exit(any(name in sys.modules for name in {slow}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


BFLOAT16, FLOAT32 = [torch.bfloat16] * 3, [torch.float32] * 3


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize(
    ("form", "dtypes", "sizes"),
    [
        (LOG_SPACE, [*BFLOAT16, torch.float32], (64, 64, 64, 1)),
        (LOG_SPACE, [*BFLOAT16, torch.float32], (64, 64, 32, 1)),
        (LOG_SPACE, BFLOAT16, (32, 32, 32)),
        (LOG_SPACE, BFLOAT16, (128, 128, 128)),
        (LOG_SPACE, [*FLOAT32, torch.float32], (64, 64, 64, 1)),
        (SIGNED, [*BFLOAT16, torch.float32], (64, 64, 64, 1)),
        (LINEAR, BFLOAT16, (64, 64, 64)),
    ],
)
def test_kernels_of_log_attention_agree_with_the_definition(device, form, dtypes, sizes):
    with suspended():
        agreement.compare_log_attention(device, dtypes, sizes, form=form)


def test_only_our_own_launches_have_these_settings(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("DISABLE_MMA_V3", "as before")
    monkeypatch.setattr(triton_launch, "_capability", lambda: 90)
    before = dict(os.environ)
    with triton_launch.launching(torch.zeros(1)):
        assert os.environ["DISABLE_MMA_V3"] == "1"
        assert triton_launch._release(triton_launch.triton.knobs.nvidia.ptxas.version) >= (12, 9)
    assert dict(os.environ) == before


SHARED = {80: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program can have, by compute capability.

Triton's code for 8.0 is that for 8.6 and 8.9, which have less shared memory.
"""
LARGEST = [(dtype, 128, 128) for dtype in ("bfloat16", "float16", "float32")]
"""Types and features of a key and a value that have the most, in docs/kernels.md."""
KERNELS = {
    "loss": ["cross_entropy_kernel"],
    "log_recurrence": ["recurrence_forward", "recurrence_backward"],
    "log_attention": ["states", "scan", "outputs", "query_grads", "key_grads"],
}


def of_log_attention(dtype, d, d_v, gates, **given):
    """A case of kernel_resources.py."""
    given = {"form": "LOG_SPACE", "of_values": dtype} | given
    return {"operator": "log_attention", "dtype": dtype, "d": d, "d_v": d_v, "gates": gates} | given


def forms():
    """The other forms, and values that are wider than keys."""
    return [
        of_log_attention("bfloat16", 32, 32, True, form="SIGNED", of_values="float32", assembled=False),
        of_log_attention("bfloat16", 20, 40, False, form="LINEAR", assembled=False),
    ]


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.slow
def test_kernels_compile_for_gpus_that_are_not_here(kernel_resources, capability):
    """They fit where the documentation says so.

    The interpreter lacks the compiler's types: a variable keeps its own, and its shape, in a loop.
    """
    others = itertools.product(["bfloat16", "float32"], ["loss", "log_recurrence"])
    cases = [
        *({"operator": operator, "dtype": dtype} for dtype, operator in others),
        *({"operator": "loss", "dtype": dtype, "cap": 15.0} for dtype in ("bfloat16", "float32")),
        *(of_log_attention(*largest, True, assembled=False) for largest in LARGEST),
        *forms(),
    ]
    for case, compiled in zip(cases, kernel_resources(capability, *cases), strict=True):
        assert list(compiled) == KERNELS[case["operator"]]
        for row in compiled.values():
            assert row["shared"] <= SHARED[capability] * 1024
