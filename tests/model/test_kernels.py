"""The choice between kernels and plain torch, and the compilation of kernels for GPUs that are not here."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.ops import custom
from model.ops import log_attention as operator
from model.ops.kernels import _fastest_on_gpu
from model.ops.linear_cross_entropy import summed_loss
from model.ops.log_attention import log_attention
from model.ops.log_recurrence import log_recurrence

ROOT = Path(__file__).resolve().parents[2]
FORMS = "chunked", "triton"
OPERATORS = {
    "summed_loss": lambda **options: summed_loss(
        torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.int64), **options
    ),
    "log_attention": lambda **options: log_attention(*torch.zeros(3, 1, 1, 2, 3), **options),
    "log_recurrence": lambda **options: log_recurrence(*torch.zeros(2, 1, 2, 3), **options)[0],
}


@pytest.mark.parametrize(
    ("major", "dtype", "d_k", "backend"),
    [
        (9, torch.bfloat16, 128, "triton"),
        (9, torch.float64, 16, "chunked"),  # would compile for minutes
        (9, torch.bfloat16, 129, "chunked"),
        (8, torch.bfloat16, 128, "triton"),
        (8, torch.float32, 64, "triton"),
        (8, torch.float32, 128, "chunked"),  # no room for its operands
        (7, torch.bfloat16, 32, "chunked"),
    ],
)
def test_auto_takes_triton_on_the_gpus_that_it_fits(fake_gpu, monkeypatch, capsys, major, dtype, d_k, backend):
    fake_gpu.major = major
    monkeypatch.setattr("model.ops.kernels.failed_check", lambda *_, **__: None)
    arguments = "log attention", *FORMS, operator._check, operator._why_not_triton, 0, *[(dtype, d_k)] * 3
    assert [_fastest_on_gpu(*arguments) for _ in range(2)] == [backend] * 2
    (line,) = capsys.readouterr().out.splitlines()  # said once
    assert line.startswith(f"log attention uses {backend}")


@pytest.mark.parametrize("name", OPERATORS)
def test_auto_is_plain_torch_on_a_cpu(fake_gpu, name):
    assert torch.equal(OPERATORS[name](), OPERATORS[name](backend="chunked"))


@pytest.mark.parametrize("name", OPERATORS)
def test_a_backend_that_cannot_be_is_refused_in_one_line(fake_gpu, monkeypatch, name):
    with pytest.raises(ValueError, match=r"^backend='fast' does not exist: choose one of auto, .*chunked, triton$"):
        OPERATORS[name](backend="fast")
    with pytest.raises(ValueError, match=r"^backend='triton' needs an NVIDIA GPU .* on cpu; use backend='chunked'"):
        OPERATORS[name](backend="triton")
    monkeypatch.setattr("model.ops.kernels.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install triton; use backend='chunked', which runs everywhere$"):
        OPERATORS[name](backend="triton")


@pytest.mark.slow
def test_triton_is_imported_when_a_kernel_is_used():
    code = "import sys, model.gpt; sys.exit(any(name.endswith('.triton') for name in sys.modules if 'model' in name))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.slow
def test_what_is_slow_to_import_is_imported_when_it_is_used():
    slow = ["torch._dynamo", "torch.distributed.tensor", "sympy", "datasets"]
    code = f"import sys, inference.sample, trainer.loop; sys.exit(any(name in sys.modules for name in {slow}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@custom.assume_constant_result
def _constant():
    return os.getpid()  # a graph cannot hold this call


@custom.disable
def _not_compiled(x):
    assert not torch.compiler.is_compiling()
    return x + 1


def test_marks_for_the_compiler_are_those_of_torch():
    x = torch.ones(3)
    whole = torch.compile(lambda x: x * _constant(), backend="eager", fullgraph=True)
    assert torch.equal(whole(x), x * os.getpid())
    in_parts = torch.compile(lambda x: _not_compiled(x * 2) * 3, backend="eager")
    assert torch.equal(in_parts(x), (x * 2 + 1) * 3)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_not_compiled"):
        torch.compile(lambda x: _not_compiled(x), backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.slow
def test_kernels_of_loss_and_recurrence_compile_for_gpus_that_are_not_here(kernel_resources, capability):
    cases = [
        {"capability": capability, "operator": operator, "dtype": dtype}
        for dtype, operator in itertools.product(["bfloat16", "float32"], ["loss", "log_recurrence"])
    ]
    rows = kernel_resources(*cases)
    assert [row["kernel"] for row in rows] == 2 * ["cross_entropy_kernel", "recurrence_forward", "recurrence_backward"]
    assert all(row["stack"] == 0 for row in rows)  # nothing spills


@pytest.mark.parametrize(
    ("capability", "dtype", "d", "kinds"),
    [
        (90, "bfloat16", 32, [(False, True, "float32"), (True, True, "bfloat16"), (True, False, "bfloat16")]),
        (90, "float32", 16, [(False, False, "float32"), (True, False, "float32")]),
        (100, "bfloat16", 32, [(False, False, "bfloat16"), (True, True, "bfloat16")]),
    ],
)
@pytest.mark.slow
def test_kernels_of_log_attention_compile_for_gpus_that_are_not_here(kernel_resources, capability, dtype, d, kinds):
    """The interpreter lacks the compiler's types: a variable keeps its own, and its shape, in a loop."""
    given = {"capability": capability, "operator": "log_attention", "dtype": dtype, "d": d, "d_v": d}
    cases = [given | {"gates": gates, "carried": state, "of_values": values} for gates, state, values in kinds]
    cases.append(cases[-1] | {"segments": 3})
    rows = kernel_resources(*cases)
    kernels = ["forward_sweep", "exact_forward", "backward_sweep", "exact_backward"]
    assert [row["kernel"] for row in rows] == kernels * len(cases)
    assert all(row["shared"] <= 99 * 1024 for row in rows)  # which every GPU from 8.0 on has


SHARED = {80: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program can have, by compute capability.

Triton's code for 8.0 is that for 8.6 and 8.9, which have less shared memory.
"""
SHIPPED = {"flagship": (64, 64, True), "flagship_1m": (64, 32, True), "heinsen": (32, 32, False)}
MOST = {"bfloat16": 128, "float16": 64, "float32": 64}
"""Features of a key by type, with gates, in docs/kernels.md."""


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.slow
def test_kernels_fit_where_the_documentation_says_so_and_those_of_shipped_models_compute_every_exponential_once(
    kernel_resources, capability
):
    """On 8.0 and 9.0, heads of 32 features spill nothing, and those of 64 little. The exact kernels need less."""
    given = {"capability": capability, "operator": "log_attention", "carried": False, "only": "sweep"}
    in_bfloat16 = given | {"dtype": "bfloat16", "of_values": "bfloat16"}
    shipped = [in_bfloat16 | {"d": d, "d_v": e, "gates": gates} for d, e, gates in SHIPPED.values()]
    of_type = [given | {"dtype": dtype, "of_values": dtype, "d": d, "d_v": d} for dtype, d in MOST.items()]
    rows = kernel_resources(*shipped, *(case | {"gates": True, "assembled": False} for case in of_type))
    assert [row["kernel"] for row in rows] == ["forward_sweep", "backward_sweep"] * 6
    assert all(row["shared"] <= SHARED[capability] * 1024 for row in rows)
    for (d, e, gates), row in zip([shape for shape in SHIPPED.values() for _ in range(2)], rows, strict=False):
        threads, exponentials = 32 * row["warps"], 64 * (2 * d + e + 64 * gates)  # of a chunk of 64 tokens
        assert row["ex2"] <= 1.2 * exponentials / threads
        spilled = 0 if d == 32 else {"forward_sweep": 576, "backward_sweep": 288}[row["kernel"]]  # bytes of a thread
        assert capability not in (80, 90) or row["stack"] <= spilled
