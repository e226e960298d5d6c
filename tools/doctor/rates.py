"""Rates of matrix products, of copies in memory, and of sums over all GPUs."""

import os
import subprocess
import sys
import time

import torch
from torch.utils.benchmark import Timer

from tools.bench.harness import Row
from trainer.distributed import join_world
from trainer.runtime import peak_flops

SIZES = {"cpu": 512, "cuda": 8192}
BYTES = {"cpu": 2**27, "cuda": 2**30}
_SECONDS = 0.3
_LONGEST_WAIT = 60.0  # seconds in which processes that sum make no progress, before they are ended


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


def all_reduce_rate(n_processes: int) -> float:
    """GB/s that each of several processes, one for each GPU, sends while all sum a tensor: busbw of nccl-tests."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n_processes}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    work = [*launcher, "-m", "tools.doctor.rates"]
    return float(subprocess.check_output(work, env=environment, text=True, timeout=2 * _LONGEST_WAIT))


def _reduce(rounds: int = 5) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with join_world(device, hang_seconds=_LONGEST_WAIT) as world:
        x = torch.ones(BYTES[device.type] // 16, device=world.device)  # a quarter of the bytes of a copy
        world.sum(x)  # connects the processes
        world.wait_for_all()
        started = time.perf_counter()
        for _ in range(rounds):
            world.sum(x)
        x.sum().item()  # waits for the GPU
        seconds = (time.perf_counter() - started) / rounds
        if world.is_main:
            print(2 * (world.size - 1) / world.size * x.nbytes / seconds / 1e9)


if __name__ == "__main__":
    _reduce()
