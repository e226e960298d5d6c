"""Rates of matrix products, of copies in memory, and of sums over all GPUs."""

import os
import socket
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
        rows.append(
            {
                "type": str(dtype).removeprefix("torch."),
                "TFLOP_per_s": product / 1e12,
                "of_peak": peak and product / peak,
                "GB_per_s": 2 * x.nbytes / _seconds("y.copy_(x)", x=x, y=y) / 1e9,
            }
        )
    return rows


def _seconds(statement: str, **tensors: torch.Tensor) -> float:
    timer = Timer(statement, globals=tensors, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=_SECONDS).median)


def all_reduce_rate(n_processes: int) -> float:
    """GB/s that each of several processes, one for each GPU, sends while all sum a tensor: busbw of nccl-tests."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(n_processes)}
    line = [sys.executable, "-m", "tools.doctor.rates"]
    path = os.pathsep.join(filter(None, sys.path))
    running = [
        subprocess.Popen(
            line,
            env=os.environ | about | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(n_processes)
    ]
    try:
        printed = [process.communicate(timeout=60)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        raise RuntimeError("the processes of an all-reduce failed: see above")
    return float(printed[0])


def _reduce() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with join_world(device, hang_seconds=60) as world:
        x = torch.ones(BYTES[device.type] // 16, device=world.device)  # a quarter of the bytes of a copy
        rounds = 5
        for i in range(1 + rounds):
            if i == 1:  # the first connects the processes
                world.wait_for_all()
                started = time.perf_counter()
            world.sum(x)
        x.sum().item()  # waits for the GPU
        seconds = (time.perf_counter() - started) / rounds
        if world.is_main:
            print(2 * (world.size - 1) / world.size * x.nbytes / seconds / 1e9)


if __name__ == "__main__":
    _reduce()
