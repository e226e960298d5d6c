"""How fast the loader is, and how long training waits for it."""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.command import options_of
from data.loader import TrainBatches
from data.prefetch import Prefetch
from data.shards import MANIFEST, TokenStream, read_manifest
from tools.bench.harness import Row, benchmark, open_run, prepare_dataset

WARM_UP = 2  # steps that are not timed where batches are read ahead: nothing is read ahead of the first


@benchmark("loader: {batch_tokens:,} tokens a step, in sequences of {seq_len:,}; wait share: of the time")
def bench(options: Any) -> Row:
    """Measure the loader alone, under a dummy model and under a real one."""
    dataset_dir = options.dataset_dir or random_dataset(options.out / f"random-{options.tokens}", options.tokens)
    stream = TokenStream(dataset_dir, read_manifest(dataset_dir), "train")
    batches = TrainBatches(stream, options.seq_len, options.batch_tokens // options.seq_len, seed=1)
    tokens, x = batches.batch_size * options.seq_len, torch.zeros(8)
    steps = map(batches.batch, itertools.count())
    rows = [{"what": "loader alone"} | take_steps(lambda: next(steps), tokens, options.seconds)]
    with Prefetch(map(batches.batch, itertools.count())) as ahead:

        def dummy_step() -> None:
            next(ahead)
            ready = time.perf_counter() + tokens / options.rate
            while time.perf_counter() < ready:
                x.add_(1)

        rows.append({"what": "dummy model"} | take_steps(dummy_step, tokens, options.seconds, ahead=ahead))
    if options.model_steps:
        rows.append({"what": options.model} | real(dataset_dir, options))
    return {"rows": rows}


def random_dataset(folder: Path, n_tokens: int) -> Path:
    """Prepare random bytes, in documents of 1,000 tokens on average, unless `folder` has them already."""
    if (folder / MANIFEST).is_file():
        return folder
    rng, left = np.random.default_rng(0), n_tokens
    path = folder.with_suffix(".jsonl")  # the same each time: a preparation that was stopped goes on
    with path.open("w", encoding="utf-8") as file:
        while left > 0:
            text = rng.integers(32, 127, 1 + int(rng.exponential(1000)), np.uint8).tobytes().decode()
            file.write(json.dumps({"text": text}) + "\n")
            left -= len(text)
    paths = options_of({"data.path": str(path), "out_dir": str(folder)})
    prepare_dataset(["data=jsonl", *paths, "val_fraction=0.05", "tokenizer=bytes"])
    path.unlink()
    return folder


def real(dataset_dir: Path, options: Any) -> Row:
    """Take training steps of a model."""
    length = f"stop_at={WARM_UP + options.model_steps}"
    paths = options_of({"dataset_dir": str(dataset_dir), "run_dir": str(options.out / "run")})
    run = open_run([f"model={options.model}", *paths, *options.set, length])
    with run.reading_ahead() as ahead:
        return take_steps(run.train_step, run.config.batch_tokens, steps=options.model_steps, ahead=ahead)


def take_steps(
    step: Callable[[], object], tokens: int, seconds: float = 0.0, steps: int = 1, ahead: Prefetch[Any] | None = None
) -> Row:
    """Take steps of `tokens` tokens for at least so many seconds and steps.

    Args:
        ahead: what the steps read from, to report the share of time that they wait for it.
    """
    for _ in range(WARM_UP if ahead else 0):
        step()
    waited, started, done = ahead.waited if ahead else 0.0, time.perf_counter(), 0
    while done < steps or time.perf_counter() - started < seconds:
        step()
        done += 1
    elapsed = time.perf_counter() - started
    figures = {"seconds": elapsed, "tokens_per_second": done * tokens / elapsed}
    return figures | ({"wait_share": (ahead.waited - waited) / elapsed} if ahead else {})
