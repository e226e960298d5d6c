"""From compressed text to verified shards, beside the tokenizer library's own."""

import contextlib
import multiprocessing
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from common.command import overrides
from common.console import say
from common.settings import UserError
from data.prepare.items import Unreadable
from data.prepare.sources import JsonlSource
from data.tokenizer import END_OF_TEXT, GPT2Config, build_tokenizer
from tools.bench.harness import Row, benchmark

_SECONDS_BETWEEN_LOOKS = 0.02
ROOT = Path(__file__).resolve().parents[2]


class Cost(NamedTuple):
    """The cost of processing all documents, summed over processes."""

    seconds: float
    cpu_seconds: float
    gigabytes: float
    """Largest resident memory."""


@benchmark("medians of {rounds} rounds; x: ratio to the library, by {workers} threads of it")
def bench(options: Any) -> Row:
    """Measure the rate beside the library's, CPU seconds and the largest peak."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        work = encode_batch if options.tokenizer_json else encode_ordinary
        found = [(pool.apply(work, (options,)), prepare_and_verify(options)) for _ in range(options.rounds)]
    threads = options.workers if options.tokenizer_json else 1
    n_bytes, alone = found[0][0][0], [cost for (_, cost), _ in found]
    prepared, verified = zip(*(costs for _, costs in found), strict=True)
    costs = {f"{work.__name__}, threads: {threads}": alone, "prepared": prepared, "prepared and verified": verified}
    rows = [
        {
            "what": what,
            "MB_per_second": median(n_bytes / 1e6 / one.seconds for one in rounds),
            "x": median(
                first.seconds * threads / (options.workers * one.seconds)
                for first, one in zip(alone, rounds, strict=True)
            ),
            "cpu_seconds": median(one.cpu_seconds for one in rounds),
            "peak_gigabytes": max(one.gigabytes for one in rounds),
        }
        for what, rounds in costs.items()
    ]
    return {"rows": rows, "utf8_bytes": n_bytes}


def encode_ordinary(options: Any) -> tuple[int, Cost]:
    """Bytes of the documents, and what encode_ordinary takes for them, one after the other."""
    tokens = build_tokenizer(GPT2Config(name="gpt2", path=options.ranks)).tokens
    encode = tiktoken.Encoding(  # like tiktoken.get_encoding("gpt2"), whose pattern is not this project's
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens[:-1])},
        special_tokens={END_OF_TEXT: len(tokens) - 1},
    ).encode_ordinary
    return _timed(options, 1, lambda texts: encode(texts[0]))


def encode_batch(options: Any) -> tuple[int, Cost]:
    """Bytes of the documents, and what encode_batch_fast takes for them, a thousand at a time."""
    os.environ |= {"RAYON_NUM_THREADS": str(options.workers), "TOKENIZERS_PARALLELISM": "true"}
    from tokenizers import Tokenizer  # which not every installation has

    library = Tokenizer.from_file(str(options.tokenizer_json))
    return _timed(options, 1000, lambda texts: library.encode_batch_fast(texts, add_special_tokens=False))


def _timed(options: Any, at_once: int, encode: Callable[[list[str]], object]) -> tuple[int, Cost]:
    """Bytes of the documents, and what it takes to encode them, `at_once` at a time."""
    n_bytes, seconds, cpu_seconds, texts = 0, 0.0, 0.0, _texts(options.files)
    while batch := list(islice(texts, at_once)):
        started, cpu_started = time.perf_counter(), time.process_time()
        encode(batch)
        seconds += time.perf_counter() - started
        cpu_seconds += time.process_time() - cpu_started
        n_bytes += sum(len(text.encode()) for text in batch)
    return n_bytes, Cost(seconds, cpu_seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)


def _texts(files: list[str]) -> Iterator[str]:
    source = JsonlSource(name="jsonl", path=files, text_field="text")
    for raw in source.documents():
        with contextlib.suppress(Unreadable):
            yield source.parse(raw).text


def prepare_and_verify(options: Any) -> tuple[Cost, Cost]:
    """Return the cost of preparing, and of preparing and verifying together."""
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        dataset_dir = f"{folder}/dataset"
        settings = {
            "data": "jsonl",
            "data.path": options.files,
            "tokenizer": "hf" if options.tokenizer_json else "gpt2",
            "tokenizer.path": str(file) if (file := options.tokenizer_json or options.ranks) else None,
            "out_dir": dataset_dir,
            "workers": options.workers,
        }
        prepared = run("scripts/prepare_data.py", *shlex.split(overrides(settings)))
        then = run("scripts/verify_dataset.py", f"dataset_dir={dataset_dir}")
    peak = max(prepared.gigabytes, then.gigabytes)
    return prepared, Cost(prepared.seconds + then.seconds, prepared.cpu_seconds + then.cpu_seconds, peak)


def run(*command: str) -> Cost:
    """Run a script of this repository with its options to its end.

    Raises:
        UserError: it failed.
    """
    with tempfile.TemporaryFile("w+") as said:
        started, before, peak = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN), 0
        process = subprocess.Popen([sys.executable, ROOT / command[0], *command[1:]], stdout=said, stderr=said)
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        if process.returncode:
            said.seek(0)
            raise UserError(f"{' '.join(command)} failed: {said.read()[-2000:]}")
    cost = Cost(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak / 1e9)
    say(f"{command[0]}: {cost.seconds:.1f} s, {cost.cpu_seconds:.1f} CPU s, {cost.gigabytes:.2f} GB")
    return cost


def resident(pid: int) -> int:
    """Bytes of memory that a process and all its descendants hold; 0 where there is no /proc."""
    total = 0
    with contextlib.suppress(OSError):  # it has just ended
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        total = pages * os.sysconf("SC_PAGE_SIZE")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += sum(map(resident, map(int, (thread / "children").read_text().split())))
    return total
