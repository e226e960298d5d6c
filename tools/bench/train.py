"""Training steps of whole models side by side."""

import json
import multiprocessing
import os
import resource
import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from common.console import say, show_table
from common.files import make_directory
from tools.bench.harness import Row, in_turn, table_of, timed, write_results

if TYPE_CHECKING:
    from trainer.config import TrainConfig

CONTROL = "gpt2_124m"


def bench(options: Any) -> None:
    """Measure, print a table, write bench.json."""
    names = dict.fromkeys([CONTROL, *options.models])
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # glibc reads it when a process starts
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:

        def measured(name: str) -> Row:
            result = pool.apply(measure, (name, options.set, options.seq_len, options.batch, options.steps))
            say(f"{name}: {json.dumps(result)}")
            return result

        results = in_turn({name: partial(measured, name) for name in names}, options.rounds)
    figures = {name: summary(found) for name, found in results.items()}
    cells, control = [], figures[CONTROL]
    for name, row in figures.items():
        rate, peak = row["tokens_per_second"], row["peak_bytes"]
        cells.append([name, f"{rate:,.1f}", f"{rate / control['tokens_per_second']:.2f}"])
        cells[-1] += [f"{peak / 1e9:.2f}", f"{peak / control['peak_bytes']:.2f}"]
    title = f"training steps, {options.batch} x {options.seq_len} tokens; x: ratio to {CONTROL}"
    show_table(table_of(title, ["model", "tokens/s", "x", "peak GB", "x"], cells))
    write_results(make_directory(options.out, "out"), options, {"models": figures})


def measure(name: str, overrides: list[str], seq_len: int, batch: int, steps: int) -> Row:
    """Seconds of each timed step and peak memory in bytes, in this process.

    On the CPU the peak is the process's own, including 0.4 GB for the interpreter and torch.
    """
    import torch

    from cli import compose, to_dict
    from common.settings import decode
    from trainer.config import TrainConfig

    sizes = {"seq_len": seq_len, "batch_tokens": batch * seq_len}
    composed = to_dict(compose("train", [f"model={name}", "dataset_dir=none", *overrides])) | sizes
    if composed["model"]["position"]["name"] == "learned":
        composed["model"]["position"]["max_len"] = max(seq_len, composed["model"]["position"]["max_len"])
    step = timed(stepper(decode(TrainConfig, composed)))
    seconds = [round(step(), 4) for _ in range(1 + steps)][1:]
    on_gpu = torch.cuda.is_initialized()
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak_bytes": peak, "tokens": batch * seq_len}


def stepper(config: "TrainConfig") -> Callable[[], object]:
    """A function that takes a training step of this run, always on the same random tokens."""
    import torch

    from model.gpt import GPT
    from trainer.runtime import maybe_compile, open_runtime
    from trainer.step import SummedLoss, train_step

    runtime = open_runtime(config.runtime)
    torch.manual_seed(0)
    gpt = GPT(config.model).to(runtime.device, runtime.param_dtype)
    optimizer = config.optim.build(gpt)
    summed_loss = SummedLoss(gpt)
    maybe_compile([summed_loss], config.runtime, runtime.device)
    ids = torch.randint(config.model.n_vocab, (config.batch_size, config.seq_len + 1), device=runtime.device)
    batch = [(ids[:, :-1], ids[:, 1:])]
    return lambda: train_step(summed_loss, optimizer, batch, runtime, grad_clip=config.optim.grad_clip)


def summary(results: list[Row]) -> Row:
    """Median over all timed steps, and the largest peak."""
    seconds = statistics.median(s for result in results for s in result["seconds"])
    return {
        "seconds_per_step": seconds,
        "tokens_per_second": results[0]["tokens"] / seconds,
        "peak_bytes": max(result["peak_bytes"] for result in results),
    }
