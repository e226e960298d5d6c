"""What the kernels of log attention need on GPUs that need not be present."""

import itertools
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from model.ops.log_attention.triton import triton_log_attention


def inspect(capability: int, dtype: list[str], head_dim: list[int], gates: list[str]) -> None:
    """Print the table, a few rows as soon as their kernels are compiled; 90 is compute capability 9.0."""
    print("| type | features | gates | kernel | warps | registers | stack, bytes | shared memory, KiB |")
    print("|---|---|---|---|---|---|---|---|")
    for type_name, d, kind in itertools.product(dtype, head_dim, gates):
        for name, binary in compiled(getattr(torch, type_name), d, kind, capability).items():
            print(f"| {type_name} | {d} | {kind} | {name} | {resources(binary)} |", flush=True)


def compiled(dtype: torch.dtype, d: int, gates: str, capability: int) -> dict[str, Any]:
    """The kernels that a causal forward and backward pass over heads of d features launches, compiled and not run."""
    target = GPUTarget("cuda", capability, 32)
    gpu = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )
    found: dict[str, Any] = {}
    launch = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found[kernel.__name__] = launch(kernel, *arguments, grid=grid, warmup=True, **options)

    tensors = torch.zeros(16, 1024, 24, 4 * d, dtype=dtype).transpose(1, 2).split(d, dim=-1)
    q, k, log_v, of_features = (x.detach().requires_grad_() for x in tensors)
    log_f = {"none": None, "head": of_features[..., :1], "feature": of_features}[gates]
    driver.set_active(gpu)
    with patch.object(JITFunction, "run", compile_only), torch.enable_grad():
        log_y = triton_log_attention(q, k, log_v, log_f)
        assert isinstance(log_y, torch.Tensor)
        log_y.sum().backward()
    return found


def resources(binary: Any) -> str:
    """A row of the table: registers of a thread, bytes it spills to memory, shared memory of a program."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", text)}
    return f"{binary.metadata.num_warps} | {used['REG']} | {used['STACK']:,} | {binary.metadata.shared / 1024:.0f}"
