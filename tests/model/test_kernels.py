"""The choice between kernels and plain torch, and the compilation of kernels for GPUs that are not here."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import agreement
import pytest
import torch
from made_on import suspended

from model.ops import custom, triton_launch
from model.ops import log_attention as operator
from model.ops.linear_cross_entropy import summed_loss
from model.ops.log_attention import LINEAR, LOG_SPACE, SIGNED, log_attention
from model.ops.log_attention import triton_attention as launches
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
    ("major", "dtype", "d_k", "fits"),
    [
        (9, torch.bfloat16, 128, True),
        (9, torch.bfloat16, 129, False),
        (8, torch.bfloat16, 128, True),
        (8, torch.float32, 128, True),
        (7, torch.bfloat16, 32, False),
    ],
)
def test_triton_is_for_the_gpus_that_it_fits(fake_gpu, major, dtype, d_k, fits):
    fake_gpu.major = major
    assert (operator._why_not_triton("cuda", 0, dtype, d_k) is None) == fits


@pytest.mark.parametrize("name", OPERATORS)
def test_auto_is_plain_torch_on_a_cpu(fake_gpu, name):
    assert torch.equal(OPERATORS[name](), OPERATORS[name](backend="chunked"))


@pytest.mark.parametrize("name", OPERATORS)
def test_a_backend_that_cannot_be_is_refused_in_one_line(fake_gpu, monkeypatch, name):
    with pytest.raises(ValueError, match=r"^backend='fast' does not exist: choose one of auto, .*chunked, triton; "):
        OPERATORS[name](backend="fast")
    with pytest.raises(ValueError, match=r"^backend='triton' needs an NVIDIA GPU, .* on cpu; backend='chunked' runs"):
        OPERATORS[name](backend="triton")
    monkeypatch.setattr("model.ops.kernels.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install triton; backend='chunked' runs everywhere$"):
        OPERATORS[name](backend="triton")


@pytest.mark.slow
def test_what_is_slow_to_import_is_imported_when_it_is_used():
    slow = ["torch._dynamo", "torch.distributed.tensor", "sympy", "datasets"]
    slow.append("model.ops.log_attention.triton_attention")
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


@pytest.mark.slow
@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_a_kernel_with_a_wrong_stride_is_found(monkeypatch, dimension):
    """Of the batch, heads or tokens."""

    def wrong(x, tokens=launches._tokens):
        pointer, strides = tokens(x)
        return launches.Tokens(pointer, (*strides[:dimension], 1, *strides[dimension + 1 :]))

    monkeypatch.setattr(launches, "_tokens", wrong)
    with pytest.raises(AssertionError, match="y is off by"):
        agreement.compare_log_attention("cpu", [*BFLOAT16, torch.float32], (4, 4, 3, 1), lengths=(5,))


@pytest.mark.parametrize(
    ("capability", "bundled", "newer", "cuda", "names"),
    [
        (90, "12.8", "12.9", "12.6", {"DISABLE_MMA_V3", "TRITON_PTXAS_PATH"}),
        (90, "12.8", "13.1", "13.0", {"DISABLE_MMA_V3", "TRITON_PTXAS_PATH"}),
        (90, "12.8", "13.1", "12.8", {"DISABLE_MMA_V3"}),  # its driver may not load machine code of CUDA 13
        (90, "13.3", "13.3", "13.0", {"DISABLE_MMA_V3"}),
        (80, "12.8", "13.1", "13.0", set()),
    ],
)
def test_kernels_for_hopper_are_compiled_without_wgmma_by_a_new_assembler(
    monkeypatch, capability, bundled, newer, cuda, names
):
    tools = SimpleNamespace(
        ptxas=SimpleNamespace(version=bundled), ptxas_blackwell=SimpleNamespace(version=newer, path="")
    )
    monkeypatch.setattr(triton_launch.triton, "knobs", SimpleNamespace(nvidia=tools))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert set(triton_launch._settings.__wrapped__(capability)) == names


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
SHIPPED = {"flagship": (64, 64, True), "flagship_1m": (64, 32, True), "heinsen": (32, 32, False)}
KERNELS = {
    "loss": ["cross_entropy_kernel"],
    "log_recurrence": ["recurrence_forward", "recurrence_backward"],
    "log_attention": ["states", "scan", "outputs", "query_grads", "key_grads"],
}


def test_prompts_of_many_lengths_need_few_variants_of_a_kernel(run_process):
    """Each variant is compiled while texts wait."""
    pytest.importorskip("triton.backends.nvidia")
    [result] = run_process([Path(__file__).with_name("kernel_variants.py")], timeout=600)
    variants = json.loads(result.out)
    assert list(variants) == ["states", "scan", "outputs", "recurrence_forward"]
    assert max(variants.values()) <= 2


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
            if case["operator"] != "log_attention":
                assert row["stack"] == 0  # nothing spills


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.slow
def test_kernels_of_shipped_models_compute_every_exponential_once(kernel_resources, capability):
    """But those of gates between two tokens, which backward kernels compute twice rather than spill them."""
    models = SHIPPED if capability in (80, 90) else {"flagship": SHIPPED["flagship"]}
    cases = [of_log_attention("bfloat16", *model) for model in models.values()]
    for (d, d_v, gates), compiled in zip(models.values(), kernel_resources(capability, *cases), strict=True):
        for name, row in compiled.items():
            is_backward = name in ("query_grads", "key_grads")
            exponentials = 64 * (2 * d + d_v + (64 + 64 * is_backward) * gates)  # of a chunk of 64 tokens
            assert row["ex2"] <= 1.1 * exponentials / (32 * row["warps"])
            assert row["stack"] <= (400 if is_backward and d == 64 else 8)  # bytes of a thread
            assert row["shared"] <= 48 * 1024  # two programs of 4 warps fill a multiprocessor's registers


@pytest.mark.slow
def test_kernels_compile_with_triton_3_6(kernel_resources, tmp_path, monkeypatch):
    """The oldest version that pyproject.toml allows; it comes with torch 2.11."""
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, "triton==3.6.0"]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install triton 3.6: {done.stderr.strip().splitlines()[-1]}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    for capability in SHARED:
        rows = kernel_resources(capability, *forms())
        assert [list(case) for case in rows] == [KERNELS["log_attention"]] * 2
