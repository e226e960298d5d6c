"""The rate of training on this machine, by running a few micro-batches of it."""

import math
import statistics
import time
from collections.abc import Callable

import torch

from common.console import Track
from model.gpt import GPT
from trainer.config import TrainConfig
from trainer.run import SummedLoss
from trainer.runtime import maybe_compile, open_runtime

_SECONDS = 5.0
_FEWEST, _MOST = 3, 100  # micro-batches


def measure_rate(config: TrainConfig, micro_batch: int, sequences: int) -> float:
    """Tokens a second of one device here, in steps over so many sequences: forward, backward, clipping and optimizer.

    On random tokens: reading, evaluating and saving are left out. Of the micro-batches, the median counts.
    """
    runtime = open_runtime(config.runtime)
    gpt = GPT(config.model).to(runtime.device, runtime.param_dtype)
    optimizer = config.optim.build(gpt)
    summed_loss = SummedLoss(gpt)
    maybe_compile([summed_loss], config.runtime, runtime.device)
    ids = torch.randint(config.model.n_vocab, (2, micro_batch, config.seq_len), device=runtime.device)

    def one_micro_batch() -> None:
        with runtime.autocast():
            loss = summed_loss(*ids) / ids[0].numel()
        loss.backward()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), config.optim.grad_clip or math.inf)
        optimizer.step()

    passes: list[float] = []
    with Track("measuring", None) as track:
        _seconds(one_micro_batch, runtime.device)  # compiles, and takes the memory that the others use again
        while len(passes) < _FEWEST or (sum(passes) < _SECONDS and len(passes) < _MOST):
            passes.append(_seconds(one_micro_batch, runtime.device))
            track.advance(ids[0].numel(), "tokens")
        updates = [_seconds(update, runtime.device) for _ in range(_FEWEST)]
    step = statistics.median(passes) * sequences / micro_batch + statistics.median(updates)
    return sequences * config.seq_len / step


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
