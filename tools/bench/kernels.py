"""What the kernels of log attention take of GPUs that need not be here."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.ops.log_attention import triton as operator

KERNELS = ("forward_sweep", "exact_forward", "backward_sweep", "exact_backward")
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
TYPES |= {torch.int8: "i8", torch.int64: "i64"}
ALIGNED = [["tt.divisibility", 16]]


def inspect(dtypes: list[str], head_sizes: list[int], capability: int) -> None:
    """Print the table, a row as soon as its kernel is compiled; 90 is compute capability 9.0."""
    print("| type | features | kernel | warps | registers | stack, bytes | shared memory, KiB |")
    print("|---|---|---|---|---|---|---|")
    for dtype in dtypes:
        for d in head_sizes:
            for name, (kernel, values) in launches(getattr(torch, dtype), d).items():
                row = resources(compiled(kernel, values, capability))
                print(f"| {dtype} | {d} | {name} | {row} |", flush=True)


class Recorder:
    """Stands for a kernel and keeps the arguments that it would be launched with."""

    def __init__(self, kernel: Any, launches: dict[str, tuple[Any, dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int]) -> Any:
        """The launcher for a grid."""

        def launch(*arguments: Any, **options: Any) -> None:
            values = dict(zip(self.kernel.arg_names, arguments, strict=False)) | options
            self.launches[self.kernel.__name__] = self.kernel, values

        return launch


def launches(dtype: torch.dtype, d: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """What a causal forward and backward pass over heads of d features would launch."""
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    q, k, log_v = torch.zeros(16, 1024, 24, 3 * d, dtype=dtype).transpose(1, 2).split(d, dim=-1)
    recorders: dict[str, Any] = {name: Recorder(getattr(operator, name), found) for name in KERNELS}
    with patch.multiple(operator, **recorders), torch.enable_grad():
        leaves = [x.requires_grad_() for x in (q.detach(), k.detach(), log_v.detach())]
        log_y = operator.triton_log_attention(*leaves)
        assert isinstance(log_y, torch.Tensor)
        log_y.sum().backward()
    return found


def compiled(kernel: Any, arguments: dict[str, Any], capability: int) -> Any:
    """The kernel as triton compiles it for these arguments."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if isinstance(value, torch.Tensor):
            signature[name], attributes[i,] = f"*{TYPES[value.dtype]}", ALIGNED
        elif isinstance(value, tuple):
            signature[name] = ("i32",) * len(value)
            attributes |= {(i, j): ALIGNED for j, x in enumerate(value) if x % 16 == 0}
        elif type(value) is int and name not in kernel.constexprs and kernel.params[i].is_constexpr is False:
            signature[name] = "i32"
            attributes |= {(i,): ALIGNED} if value % 16 == 0 else {}
        else:
            signature[name], constants[i,] = "constexpr", value
    source = ASTSource(kernel, signature, constants, attributes)
    options = {name: value for name, value in arguments.items() if name not in kernel.arg_names}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(binary: Any) -> str:
    """A row of the table: registers of a thread, bytes it spills to memory, shared memory of a program."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", text)}
    return f"{binary.metadata.num_warps} | {used['REG']} | {used['STACK']:,} | {binary.metadata.shared / 1024:.0f}"
