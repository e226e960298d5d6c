"""Training steps of whole models side by side."""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import time
from typing import Any

from rich.table import Table

from cli import compose, to_dict
from common.console import console, say
from common.files import make_directory, write_json

CONTROL = "gpt2_124m"


def bench(options: argparse.Namespace) -> None:
    """Measure, print a table, write bench.json."""
    names = [CONTROL, *(name for name in options.models if name != CONTROL)]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # glibc reads it when a process starts
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for number in range(options.rounds):
            for name in names:
                runs[name].append(
                    pool.apply(measure, (name, options.set, options.seq_len, options.batch, options.steps))
                )
                say(f"round {number + 1} of {options.rounds}, {name}: {json.dumps(runs[name][-1])}")
    figures = {name: summary(results) for name, results in runs.items()}
    console.print(table(figures, options))
    path = make_directory(options.out, "--out") / "bench.json"
    write_json(path, {"options": {k: str(v) for k, v in vars(options).items()}, "models": figures})
    say(f"written to {path}")


def measure(name: str, overrides: list[str], seq_len: int, batch: int, steps: int) -> dict[str, Any]:
    """Seconds of each timed step (forward, backward, clipping, AdamW) and peak memory in bytes, in this process.

    On the CPU the peak is the process's own, the interpreter and torch with their 0.4 GB included.
    """
    import torch

    from common.settings import decode
    from model.gpt import GPT, GPTConfig
    from trainer.optim import AdamWConfig
    from trainer.runtime import RuntimeConfig, maybe_compile, open_runtime
    from trainer.step import SummedLoss

    composed = to_dict(compose("train", [f"model={name}", "dataset_dir=none", *overrides]))
    if composed["model"]["position"]["name"] == "learned":
        composed["model"]["position"]["max_len"] = max(seq_len, composed["model"]["position"]["max_len"])
    runtime_config = decode(RuntimeConfig, composed["runtime"])
    runtime = open_runtime(runtime_config)
    torch.manual_seed(0)
    gpt = GPT(decode(GPTConfig, composed["model"])).to(runtime.device, runtime.param_dtype)
    optimizer = decode(AdamWConfig, composed["optim"]).build(gpt)
    loss_of = SummedLoss(gpt)
    maybe_compile([loss_of], runtime_config, runtime.device)
    token_ids = torch.randint(gpt.config.n_vocab, (batch, seq_len + 1), device=runtime.device)
    seconds = []
    for _ in range(1 + steps):
        started = time.perf_counter()
        with runtime.autocast():
            loss = loss_of(token_ids[:, :-1], token_ids[:, 1:]) / (batch * seq_len)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    on_gpu = runtime.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": [round(s, 4) for s in seconds[1:]], "peak_bytes": peak, "tokens": batch * seq_len}


def summary(results: list[dict[str, Any]]) -> dict[str, float]:
    """Median over all timed steps, and the largest peak."""
    seconds = statistics.median(s for result in results for s in result["seconds"])
    return {
        "seconds_per_step": seconds,
        "tokens_per_second": results[0]["tokens"] / seconds,
        "peak_bytes": max(result["peak_bytes"] for result in results),
    }


def table(figures: dict[str, dict[str, float]], options: argparse.Namespace) -> Table:
    """The models beside the control."""
    control = figures[CONTROL]
    shown = Table(title=f"training steps, {options.batch} x {options.seq_len} tokens; x: ratio to {CONTROL}")
    for column in ("model", "tokens/s", "x", "peak GB", "x"):
        shown.add_column(column, justify="left" if column == "model" else "right")
    for name, row in figures.items():
        rate, peak = row["tokens_per_second"], row["peak_bytes"]
        ratios = rate / control["tokens_per_second"], peak / control["peak_bytes"]
        shown.add_row(name, f"{rate:,.1f}", f"{ratios[0]:.2f}", f"{peak / 1e9:.2f}", f"{ratios[1]:.2f}")
    return shown
