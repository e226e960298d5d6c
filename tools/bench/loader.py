"""How fast the loader is, and how long training waits for it."""

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.table import Table

from cli import compose, to_dict
from common.console import console, say
from common.files import make_directory, write_json
from common.settings import decode
from data.loader import TrainBatches
from data.mixture import open_mixture
from data.prefetch import Prefetch
from data.prepare.writer import ShardWriter
from data.shards import (
    MANIFEST,
    RECORD,
    TOKENIZER,
    Counts,
    Manifest,
    Split,
    SplitName,
    TokenizerId,
    TokenStream,
    read_manifest,
    write_manifest,
)
from data.tokenizer import BytesConfig, build_tokenizer, save_tokenizer

MODEL = ["seq_len=256", "batch_tokens=1024", "runtime.micro_batch=4"]
Figures = dict[str, float]


def bench(options: argparse.Namespace) -> None:
    """Measure, print a table, write bench.json."""
    out = make_directory(options.out, "--out")
    dataset_dir = options.dataset_dir or random_dataset(out / "dataset", options.tokens)
    batches = open_batches(dataset_dir, options)
    steps = {name: measure(batches, options) for name, measure in (("loader alone", alone), ("dummy model", dummy))}
    if options.model_steps:
        steps[options.model] = real(dataset_dir, options)
    console.print(table(steps, options))
    write_json(out / "bench.json", {"options": {k: str(v) for k, v in vars(options).items()}, "figures": steps})
    say(f"written to {out / 'bench.json'}")


def random_dataset(folder: Path, n_tokens: int) -> Path:
    """A dataset of random bytes of 22 sets, in documents of 1,000 tokens on average; made once."""
    if (folder / MANIFEST).is_file() and read_manifest(folder).splits["train"].total.tokens >= n_tokens:
        return folder
    make_directory(folder, "--out")
    tokenizer, rng = build_tokenizer(BytesConfig(name="bytes")), np.random.default_rng(0)
    set_names = [f"set-{i:02}" for i in range(22)]
    sizes: dict[SplitName, int] = {"train": n_tokens, "val": 100_000}
    splits: dict[SplitName, Split] = {}
    for split, size in sizes.items():
        lengths = 1 + rng.exponential(1000, size // 1000 + 1).astype(np.int64)
        lengths[-1] += max(0, size - lengths.sum())
        records = np.zeros(lengths.size, RECORD)
        records["number"] = 1 + np.arange(lengths.size)
        records["set"] = rng.integers(22, size=lengths.size)
        with ShardWriter(folder, split, tokenizer.n_vocab, 100_000_000) as writer:
            writer.append(rng.integers(0, 256, lengths.sum(), np.uint16), lengths, records)
            shards = writer.finish()
        sets = {}
        for i, name in enumerate(set_names):
            mine = lengths[records["set"] == i]
            tokens = int(mine.sum())
            sets[name] = Counts(tokens=tokens, documents=mine.size, utf8_bytes=tokens)
        splits[split] = Split(sets=sets, shards=shards)
    save_tokenizer(tokenizer, folder / TOKENIZER)
    manifest = Manifest(
        tokenizer=TokenizerId(name=tokenizer.name, n_vocab=tokenizer.n_vocab, sha256=tokenizer.sha256),
        inputs=["random"],
        set_names=set_names,
        splits=splits,
        skipped={},
        prepared={},
    )
    write_manifest(folder, manifest)
    return folder


def open_batches(dataset_dir: Path, options: argparse.Namespace) -> TrainBatches:
    """The batches of a run with these options."""
    manifest = read_manifest(dataset_dir)
    stream = TokenStream(dataset_dir, manifest, "train")
    batches = TrainBatches(stream, options.seq_len, options.batch_tokens // options.seq_len, seed=1)
    if options.mixture is not None:
        started = time.perf_counter()
        batches.mixture = open_mixture(dataset_dir, manifest, options.mixture, options.seq_len, seed=1)
        say(f"{batches.n_windows:,} windows given to their sets in {time.perf_counter() - started:.1f} s")
    return batches


def alone(batches: TrainBatches, options: argparse.Namespace) -> Figures:
    """Reading as fast as one thread can."""
    steps = map(batches.batch, itertools.count())
    return timed(lambda: next(steps), options.seconds, batches.batch_size * options.seq_len)


def dummy(batches: TrainBatches, options: argparse.Namespace) -> Figures:
    """Reading ahead of a model that takes `rate` tokens per second."""
    import torch

    tokens, x = batches.batch_size * options.seq_len, torch.zeros(8)
    with Prefetch(map(batches.batch, itertools.count())) as ahead:

        def step() -> None:
            next(ahead)
            ready = time.perf_counter() + tokens / options.rate
            while time.perf_counter() < ready:
                x.add_(1)

        for _ in range(2):
            step()
        before = ahead.waited
        figures = timed(step, options.seconds, tokens)
        return figures | {"wait_share": (ahead.waited - before) / figures["seconds"]}


def real(dataset_dir: Path, options: argparse.Namespace) -> Figures:
    """Training steps of a model."""
    from trainer.config import TrainConfig
    from trainer.distributed import World
    from trainer.run import Run
    from trainer.runtime import open_runtime

    overrides = [f"model={options.model}", f"dataset_dir={dataset_dir}", f"run_dir={options.out / 'run'}", *options.set]
    composed = to_dict(compose("train", overrides))
    composed["data"]["mixture"] = options.mixture
    config = decode(TrainConfig, composed | {"stop_at": 2 + options.model_steps})
    runtime = open_runtime(config.runtime)
    run = Run(config, runtime, World(runtime.device))
    with run.reading_ahead() as ahead:
        for _ in range(2):
            run.train_step()
        before, started = ahead.waited, time.perf_counter()
        for _ in range(options.model_steps):
            run.train_step()
        seconds = time.perf_counter() - started
        tokens = options.model_steps * config.batch_tokens
        return {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "wait_share": (ahead.waited - before) / seconds,
        }


def timed(step: Callable[[], object], seconds: float, tokens: int) -> Figures:
    """Take steps of so many tokens until the time is over."""
    started, done = time.perf_counter(), 0
    while not done or time.perf_counter() - started < seconds:
        step()
        done += 1
    elapsed = time.perf_counter() - started
    return {"seconds": elapsed, "tokens_per_second": done * tokens / elapsed}


def table(figures: dict[str, Figures], options: argparse.Namespace) -> Table:
    """All measurements."""
    shown = Table(title=f"loader: {options.batch_tokens:,} tokens a step, in sequences of {options.seq_len:,}")
    for column in ("", "tokens/s", "waits for data"):
        shown.add_column(column, justify="right" if column else "left")
    for name, row in figures.items():
        wait = f"{row['wait_share']:.2%}" if "wait_share" in row else ""
        shown.add_row(name, f"{row['tokens_per_second']:,.0f}", wait)
    return shown
