"""The kernels of a training step, by the time that they take, and the host's waits."""

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from common.console import say
from tools.bench.harness import Row, benchmark
from tools.bench.train import Training, config_of

_ROWS = 30  # of the table
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
"""Names of calls in which the CPU waits for a GPU; the last is item(), which also counts on a CPU."""


@benchmark("kernels of a step of {batch} x {seq_len} tokens")
def bench(options: Any) -> Row:
    """Profile some steps and write trace.json."""
    config = config_of([f"model={options.model}", *options.set], options.seq_len, options.batch)
    training = Training(config, options.batch)
    for _ in range(2):  # compiles, and allocates memory
        training.step()
    on_gpu = training.runtime.device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiled:
        for _ in range(options.steps):
            training.step()
        if on_gpu:
            torch.cuda.synchronize()
    profiled.export_chrome_trace(str(options.out / "trace.json"))
    events, key = profiled.key_averages(), "self_device_time_total" if on_gpu else "self_cpu_time_total"
    waits = {event.key: event.count / options.steps for event in events if event.key in WAITS}
    say("waits of the CPU, a step: " + ", ".join(f"{name} {count:g}" for name, count in waits.items()))
    total = sum(getattr(event, key) for event in events)
    rows: list[Row] = [
        {
            "kernel": event.key[:100],
            "ms": getattr(event, key) / options.steps / 1e3,
            "share": getattr(event, key) / total,
            "calls": event.count / options.steps,
        }
        for event in sorted(events, key=lambda event: -getattr(event, key))[:_ROWS]
    ]
    return {"rows": rows, "waits": waits, "ms": total / options.steps / 1e3}
