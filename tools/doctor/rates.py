"""Rates of matrix products and of copies in memory."""

import torch
from torch.utils.benchmark import Timer

from tools.bench.harness import Row
from trainer.runtime import peak_flops

SIZES = {"cpu": 512, "cuda": 8192}
BYTES = {"cpu": 2**27, "cuda": 2**30}
_SECONDS = 0.3


def rates(device: torch.device) -> list[Row]:
    """Square matrix products, in TFLOP/s, and copies, in GB/s read and written, by type."""
    n, rows = SIZES[device.type], []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        if device.type == "cpu" and dtype == torch.float16:
            continue  # no program here uses it on CPUs
        a = torch.randn(n, n, device=device).to(dtype)
        x = torch.zeros(BYTES[device.type] // dtype.itemsize, dtype=dtype, device=device)
        y, peak = torch.empty_like(x), peak_flops(device, dtype)
        product = 2 * n**3 / _seconds("a @ a", a=a)
        copied = 2 * x.nbytes / _seconds("y.copy_(x)", x=x, y=y)
        row = {"type": str(dtype).removeprefix("torch."), "TFLOP_per_s": product / 1e12}
        rows.append(row | {"of_peak": peak and product / peak, "GB_per_s": copied / 1e9})
    return rows


def _seconds(statement: str, **tensors: torch.Tensor) -> float:
    timer = Timer(statement, globals=tensors, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=_SECONDS).median)
