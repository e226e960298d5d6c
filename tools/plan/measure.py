"""The rate of training on this machine, by running a few micro-batches of it."""

import statistics
import time
from collections.abc import Callable

import torch

from common.console import Track
from model.gpt import GPT
from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.runtime import maybe_compile, open_runtime
from trainer.step import SummedLoss, accumulate_gradients, train_step

_SECONDS = 5.0
_FEWEST, _MOST = 3, 100


def measure_rate(config: TrainConfig, micro_batch: int, sequences: int) -> float:
    """Tokens per second of one device here, in steps over `sequences` sequences.

    Runs on random tokens: reading, evaluating and saving are left out. Takes the medians of a few steps of one
    micro-batch and of a few passes over one more.
    """
    runtime = open_runtime(config.runtime)
    gpt = GPT(config.model).to(runtime.device, runtime.param_dtype)
    optimizer = config.optim.build(gpt)
    summed_loss = SummedLoss(gpt)
    maybe_compile([summed_loss], config.runtime, runtime.device)
    token_ids, targets = torch.randint(config.model.n_vocab, (2, micro_batch, config.seq_len), device=runtime.device)
    batch = [(token_ids, targets)]

    def step() -> None:
        train_step(summed_loss, optimizer, batch, runtime, grad_clip=config.optim.grad_clip)

    def one_more() -> None:
        accumulate_gradients(summed_loss, batch, runtime, World(runtime.device), scale=1 / targets.numel()).item()

    passes: list[float] = []
    with Track("measuring", None) as track:
        _seconds(step)  # compiles, and allocates the memory that later steps use again
        steps = [_seconds(step) for _ in range(_FEWEST)]
        while len(passes) < _FEWEST or (sum(passes) < _SECONDS and len(passes) < _MOST):
            passes.append(_seconds(one_more))
            track.advance(targets.numel(), "tokens")
    seconds = statistics.median(steps) + (sequences / micro_batch - 1) * statistics.median(passes)
    return sequences * config.seq_len / seconds


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
