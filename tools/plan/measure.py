"""The rate of training on this machine, by running a few micro-batches of it."""

import statistics

from common.console import Track
from tools.bench.harness import timed
from tools.bench.train import Training
from trainer.config import TrainConfig

_SECONDS = 5.0
_FEWEST, _MOST = 3, 100


def measure_rate(config: TrainConfig, micro_batch: int, sequences: int) -> float:
    """Measure one device's tokens per second, for steps of `sequences` sequences.

    Runs on random tokens: reading, evaluating and saving are left out. Takes the medians of a few steps of one
    micro-batch and of a few passes over one more.
    """
    training = Training(config, micro_batch)
    step, one_more = timed(training.step), timed(training.one_more)
    passes: list[float] = []
    with Track("measuring", None) as track:
        step()  # compiles, and allocates the memory that later steps use again
        steps = [step() for _ in range(_FEWEST)]
        while len(passes) < _FEWEST or (sum(passes) < _SECONDS and len(passes) < _MOST):
            passes.append(one_more())
            track.advance(micro_batch * config.seq_len, "tokens")
    seconds = statistics.median(steps) + (sequences / micro_batch - 1) * statistics.median(passes)
    return sequences * config.seq_len / seconds
