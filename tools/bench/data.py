"""From compressed text to verified shards, beside tiktoken's own."""

import contextlib
import multiprocessing
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
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
    """What work on all documents takes; of all its processes together."""

    seconds: float
    cpu_seconds: float
    gigabytes: float
    """Largest resident memory."""


@benchmark("medians of {rounds} rounds; x: ratio to {workers} x encode_ordinary")
def bench(options: Any) -> Row:
    """Measure the rate beside encode_ordinary's, CPU seconds and the largest peak."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        arguments = options.files, options.text_field, options.ranks
        found = [(pool.apply(encode_ordinary, arguments), prepare_and_verify(options)) for _ in range(options.rounds)]
    n_bytes, alone = found[0][0][0], [cost for (_, cost), _ in found]
    prepared, verified = zip(*(costs for _, costs in found), strict=True)
    costs = {"encode_ordinary, one thread": alone, "prepared": prepared, "prepared and verified": verified}
    rows = [
        {
            "what": what,
            "MB_per_second": median(n_bytes / 1e6 / one.seconds for one in rounds),
            "x": median(
                first.seconds / (options.workers * one.seconds) for first, one in zip(alone, rounds, strict=True)
            ),
            "cpu_seconds": median(one.cpu_seconds for one in rounds),
            "peak_gigabytes": max(one.gigabytes for one in rounds),
        }
        for what, rounds in costs.items()
    ]
    return {"rows": rows, "utf8_bytes": n_bytes}


def encode_ordinary(files: list[str], text_field: str, ranks: Path | None) -> tuple[int, Cost]:
    """Bytes of the documents, and what encode_ordinary takes for them, one after the other."""
    source = JsonlSource(name="jsonl", path=files, text_field=text_field)
    tokenizer = build_tokenizer(GPT2Config(name="gpt2", path=ranks))
    numbered = {token: rank for rank, token in enumerate(tokenizer.ranks)}
    encode = tiktoken.Encoding(  # like tiktoken.get_encoding("gpt2"), whose pattern is not this project's
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=numbered, special_tokens={END_OF_TEXT: tokenizer.eot_id}
    ).encode_ordinary
    n_bytes, seconds, cpu_seconds = 0, 0.0, 0.0
    for raw in source.documents():
        try:
            text = source.parse(raw).text
        except Unreadable:
            continue
        started, cpu_started = time.perf_counter(), time.process_time()
        encode(text)
        seconds += time.perf_counter() - started
        cpu_seconds += time.process_time() - cpu_started
        n_bytes += len(text.encode())
    return n_bytes, Cost(seconds, cpu_seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)


def prepare_and_verify(options: Any) -> tuple[Cost, Cost]:
    """What preparing costs, and both commands."""
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        dataset_dir = f"{folder}/dataset"
        settings = {
            "data": "jsonl",
            "data.path": options.files,
            "data.text_field": options.text_field,
            "tokenizer": "gpt2",
            "tokenizer.path": options.ranks and str(options.ranks),
            "out_dir": dataset_dir,
            "workers": options.workers,
        }
        prepared = run("scripts/prepare_data.py", *shlex.split(overrides(settings)))
        then = run("scripts/verify_dataset.py", f"dataset_dir={dataset_dir}")
    peak = max(prepared.gigabytes, then.gigabytes)
    return prepared, Cost(prepared.seconds + then.seconds, prepared.cpu_seconds + then.cpu_seconds, peak)


def run(*command: str) -> Cost:
    """Run a command to its end.

    Raises:
        UserError: it failed.
    """
    with tempfile.TemporaryFile("w+") as said:
        started, before, peak = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN), 0
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=said, stderr=said)
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
