"""Compiles the Triton kernels for a GPU that need not be present, and counts the resources that they use.

python tests/model/kernel_resources.py 90 '{"operator": "log_attention", "dtype": "bfloat16", "d": 32, "d_v": 32,
"gates": true, "form": "LOG_SPACE", "of_values": "bfloat16"}' prints for each case, here one for compute capability 9.0,
a line of JSON with its kernels. With "only": "grads", only kernels with this in their name are compiled; with
"assembled": false, without what only machine code shows. A process that has compiled for an absent GPU cannot run
kernels.
"""

import json
import re
import subprocess
import sys
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
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import JITFunction, driver

from model.ops.linear_cross_entropy.triton_cross_entropy import cross_entropy_
from model.ops.log_attention import naive_attention
from model.ops.log_attention.triton_attention import triton_log_attention
from model.ops.log_recurrence import triton_recurrence


class NotAssembled(Exception):
    """Raised in place of ptxas, which takes as long as Triton, with the kernel's metadata and PTX."""


def compiled(launch: Callable[[], None], capability: int, only: str = "", assembled: bool = True) -> dict[str, Any]:
    """The kernels that `launch` launches, compiled for a GPU of this compute capability and not run."""
    target = GPUTarget("cuda", capability, 32)
    gpu = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )
    found: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if only in kernel.__name__:
            try:
                found[kernel.__name__] = run(kernel, *arguments, grid=grid, warmup=True, **options)
            except NotAssembled as known:
                metadata, ptx = known.args
                found[kernel.__name__] = SimpleNamespace(metadata=SimpleNamespace(**metadata), asm={"ptx": ptx})

    def stop(backend: Any, source: Any, metadata: dict[str, Any], *rest: Any) -> None:
        raise NotAssembled(metadata, source)

    driver.set_active(gpu)
    with (
        patch.object(JITFunction, "run", compile_only),
        patch.object(CUDABackend, "make_cubin", CUDABackend.make_cubin if assembled else stop),
        torch.enable_grad(),
    ):
        launch()
    return found


def launch_log_attention(dtype: torch.dtype, d: int, d_v: int, gates: bool, form: str, of_values: torch.dtype) -> None:
    """A forward and backward pass over heads of d features."""
    tensors = torch.zeros(16, 1024, 24, 2 * d + d_v, dtype=dtype).transpose(1, 2).split([d, d, d_v], dim=-1)
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    v = v.detach().to(of_values).requires_grad_()
    log_f = torch.zeros(16, 1024, 24, 1).transpose(1, 2).requires_grad_() if gates else None  # the model's are float32
    state = naive_attention.empty_state(q, v)
    y, _ = triton_log_attention(q, k, v, log_f, form=getattr(naive_attention, form), state=state)
    y.sum().backward()


def launch_loss(dtype: torch.dtype, cap: float | None = None) -> None:
    """GPT-2's vocabulary, padded to a multiple of 64, with gradients."""
    cross_entropy_(torch.zeros(16, 50304, dtype=dtype), torch.zeros(16, dtype=torch.int64), 50257, True, cap)


def launch_log_recurrence(dtype: torch.dtype) -> None:
    """A forward and backward pass over the two halves of a projection."""
    log_p, h = torch.zeros(16, 1024, 2 * 768, dtype=dtype).chunk(2, dim=-1)
    start = torch.zeros(16, 768, dtype=torch.promote_types(dtype, torch.float32))
    s = triton_recurrence.forward(log_p, h, start)
    triton_recurrence.backward(s, log_p, h, start, s)


LAUNCH: dict[str, Callable[..., None]] = {
    "log_attention": launch_log_attention,
    "loss": launch_loss,
    "log_recurrence": launch_log_recurrence,
}


def resources(binary: Any) -> dict[str, int | str]:
    """Warps, registers of a thread, bytes of its stack (what it spills), and bytes of shared memory of a program.

    The version of its PTX, which is the assembler's, and how often it names wgmma. Of its machine code: instructions,
    and those that compute 2^x.
    """
    metadata, ptx = binary.metadata, binary.asm["ptx"]
    by_triton = {"warps": metadata.num_warps, "shared": metadata.shared, "wgmma": ptx.count("wgmma")}
    by_triton["ptx"] = re.search(r"\.version (\S+)", ptx)[1]
    if "cubin" not in binary.asm:
        return by_triton
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", text)}
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([A-Z][\w.]*)", text)
    return by_triton | {
        "registers": used["REG"],
        "stack": used["STACK"],
        "instructions": len(instructions),
        "ex2": sum(name.startswith("MUFU.EX2") for name in instructions),
    }


def main(capability: int, cases: list[str]) -> None:
    for case in cases:
        given = json.loads(case)
        launch = LAUNCH[given.pop("operator")]
        given |= {key: getattr(torch, given[key]) for key in ("dtype", "of_values") if key in given}
        how = {key: given.pop(key) for key in ("only", "assembled") if key in given}
        kernels = compiled(partial(launch, **given), capability, **how)
        print(json.dumps({name: resources(kernel) for name, kernel in kernels.items()}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
