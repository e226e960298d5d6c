"""Training steps of whole models side by side."""

import json
import multiprocessing
import resource
import statistics
from functools import partial
from typing import Any

import torch

from common.console import say
from common.settings import decode
from model.gpt import GPT
from tools.bench.harness import Row, benchmark, composed, in_turn, timed, with_room
from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.runtime import maybe_compile, open_runtime
from trainer.step import SummedLoss, accumulate_gradients, train_step

CONTROL = "gpt2_124m"


@benchmark("training steps of {batch} x {seq_len} tokens; x: ratio to the control")
def bench(options: Any) -> Row:
    """Measure the models in turns, the control first."""
    names = dict.fromkeys([CONTROL, *options.models])
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:

        def measured(name: str) -> Row:
            result = pool.apply(measure, (name, options.set, options.seq_len, options.batch, options.steps))
            say(f"{name}: {json.dumps(result)}")
            return result

        results = in_turn({name: partial(measured, name) for name in names}, options.rounds)
    rows: list[Row] = []
    for name, found in results.items():
        seconds = statistics.median(s for one in found for s in one["seconds"])
        rate, peak = options.batch * options.seq_len / seconds, max(one["peak_gigabytes"] for one in found)
        rows.append({"model": name, "tokens_per_second": rate, "peak_gigabytes": peak})
    for row in rows:  # the control is the first
        row |= {f"x_{key}": row[key] / rows[0][key] for key in ("tokens_per_second", "peak_gigabytes")}
    return {"rows": rows}


def measure(name: str, overrides: list[str], seq_len: int, batch: int, steps: int) -> Row:
    """Seconds of each timed step and peak memory, in this process.

    On the CPU the peak is the process's own, including 0.5 GB for the interpreter and torch.
    """
    raw = composed([f"model={name}", *overrides]) | {"seq_len": seq_len, "batch_tokens": batch * seq_len}
    raw["model"] = with_room(raw["model"], seq_len)
    step = timed(Training(decode(TrainConfig, raw), batch).step)
    seconds = [round(step(), 4) for _ in range(3 + steps)][3:]  # the first ones get new memory from the system
    on_gpu = torch.cuda.is_initialized()
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak_gigabytes": peak / 1e9}


class Training:
    """Takes training steps of a run on `batch`, which begins as `sequences` sequences of random tokens."""

    def __init__(self, config: TrainConfig, sequences: int) -> None:
        self.runtime, self.grad_clip = open_runtime(config.runtime), config.optim.grad_clip
        torch.manual_seed(config.seed)
        gpt = GPT(config.model).to(self.runtime.device, self.runtime.param_dtype)
        gpt.recompute(config.runtime.recompute)
        self.optimizer = config.optim.build(gpt, World(self.runtime.device), self.runtime.dtype)
        self.summed_loss = SummedLoss(gpt)
        maybe_compile([self.summed_loss], config.runtime, self.runtime, gpt)
        shape = (sequences, config.seq_len + 1)
        ids = torch.randint(config.model.n_vocab, shape, device=self.runtime.device)
        self.batch = [(ids[:, :-1], ids[:, 1:])]

    def step(self) -> None:
        """Take a step of one micro-batch."""
        train_step(self.summed_loss, self.optimizer, self.batch, self.runtime, grad_clip=self.grad_clip)

    def one_more(self) -> None:
        """Take one more micro-batch of a step: a forward and a backward pass."""
        world, scale = World(self.runtime.device), 1 / self.batch[0][1].numel()
        accumulate_gradients(self.summed_loss, self.batch, self.runtime, world, scale=scale)[0].item()
