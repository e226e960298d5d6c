"""What the Triton kernels need on GPUs that need not be present."""

import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from model.ops.linear_cross_entropy.triton import cross_entropy_
from model.ops.log_attention.state import LogAttentionState, empty_state
from model.ops.log_attention.triton import triton_log_attention
from model.ops.log_recurrence import triton as log_recurrence


def inspect(
    capability: int, operator: list[str], dtype: list[str], head_dim: list[int], gates: list[str], state: list[bool]
) -> None:
    """Print the table, a few rows as soon as their kernels are compiled; 90 is compute capability 9.0."""
    print("| type | features | gates | state | kernel | warps | registers | stack, bytes | shared memory, KiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for type_name, name in itertools.product(dtype, operator):
        variants = list(itertools.product(head_dim, gates, state)) if name == "log_attention" else [()]
        for variant in variants:
            d, kind, carried = variant or ("-", "-", "-")
            launched = compiled(partial(_LAUNCH[name], getattr(torch, type_name), *variant), capability)
            for kernel, binary in launched.items():
                print(f"| {type_name} | {d} | {kind} | {carried} | {kernel} | {resources(binary)} |", flush=True)


def compiled(launch: Callable[[], None], capability: int) -> dict[str, Any]:
    """The kernels that `launch` launches, compiled for a GPU of this compute capability and not run."""
    target = GPUTarget("cuda", capability, 32)
    gpu = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )
    found: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found[kernel.__name__] = run(kernel, *arguments, grid=grid, warmup=True, **options)

    driver.set_active(gpu)
    with patch.object(JITFunction, "run", compile_only), torch.enable_grad():
        launch()
    return found


def _log_attention(dtype: torch.dtype, d: int, gates: str, carried: bool, of_values: torch.dtype | None = None) -> None:
    """A forward and backward pass over heads of d features; `carried`: from a state to the next."""
    tensors = torch.zeros(16, 1024, 24, 4 * d, dtype=dtype).transpose(1, 2).split(d, dim=-1)
    q, k, log_v, of_features = (x.detach().requires_grad_() for x in tensors)
    log_v = log_v.detach().to(of_values or dtype).requires_grad_()
    log_f = {"none": None, "head": of_features[..., :1], "feature": of_features}[gates]
    state = LogAttentionState(*(x.requires_grad_() for x in empty_state(q, log_v))) if carried else None
    found = triton_log_attention(q, k, log_v, log_f, state=state, return_state=carried)
    (found[0] if isinstance(found, tuple) else found).sum().backward()


def _loss(dtype: torch.dtype) -> None:
    """GPT-2's vocabulary, padded to a multiple of 64, with gradients."""
    cross_entropy_(torch.zeros(16, 50304, dtype=dtype), torch.zeros(16, dtype=torch.int64), 50257, True, None)


def _log_recurrence(dtype: torch.dtype) -> None:
    """A forward and backward pass over the two halves of a projection."""
    log_p, h = torch.zeros(16, 1024, 2 * 768, dtype=dtype).chunk(2, dim=-1)
    start = torch.zeros(16, 768, dtype=torch.promote_types(dtype, torch.float32))
    s = log_recurrence.forward(log_p, h, start)
    log_recurrence.backward(s, log_p, h, start, s)


_LAUNCH: dict[str, Callable[..., None]] = {
    "log_attention": _log_attention,
    "loss": _loss,
    "log_recurrence": _log_recurrence,
}


def resources(binary: Any) -> str:
    """A row of the table: registers of a thread, bytes it spills to memory, shared memory of a program."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", text)}
    return f"{binary.metadata.num_warps} | {used['REG']} | {used['STACK']:,} | {binary.metadata.shared / 1024:.0f}"
