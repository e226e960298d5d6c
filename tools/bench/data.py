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
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from common.command import overrides
from common.console import say
from common.settings import UserError
from data.prepare.items import Unreadable
from data.prepare.sources import JsonlSource
from data.tokenizer import END_OF_TEXT, GPT2Config, build_tokenizer
from tools.bench.harness import Row, benchmark, in_turn, print_table

_SECONDS_BETWEEN_LOOKS = 0.02
ROOT = Path(__file__).resolve().parents[2]


@benchmark
def bench(options: Any) -> Row:
    """Measure and print a table: median rates in MB/s of text, their ratio, CPU seconds and the largest peak."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        arguments = options.files, options.text_field, options.ranks
        runs = {"alone": partial(pool.apply, encode_ordinary, arguments), "whole": partial(prepare_and_verify, options)}
        found = in_turn(runs, options.rounds)
    rounds = [alone | whole for alone, whole in zip(found["alone"], found["whole"], strict=True)]
    megabytes, workers = rounds[0]["utf8_bytes"] / 1e6, options.workers
    alone = [megabytes / r["encode_ordinary_seconds"] for r in rounds]
    verified = [megabytes / (r["prepare_seconds"] + r["verify_seconds"]) for r in rounds]
    figures = {
        "megabytes": megabytes,
        "encode_ordinary": median(alone),
        "prepared": median(megabytes / r["prepare_seconds"] for r in rounds),
        "verified": median(verified),
        "ratio": median(whole / (workers * one) for whole, one in zip(verified, alone, strict=True)),
        "encode_ordinary_cpu_seconds": median(r["encode_ordinary_cpu_seconds"] for r in rounds),
        "cpu_seconds": median(r["prepare_cpu_seconds"] + r["verify_cpu_seconds"] for r in rounds),
        "peak_bytes": max(max(r["prepare_peak_bytes"], r["verify_peak_bytes"]) for r in rounds),
    }
    shown = {key: f"{value:.2f}" for key, value in figures.items()}
    prepared_ratio = figures["prepared"] / workers / figures["encode_ordinary"]
    cells = [
        ["encode_ordinary, one thread", shown["encode_ordinary"], "", shown["encode_ordinary_cpu_seconds"], ""],
        [f"prepared, {workers} workers", shown["prepared"], f"{prepared_ratio:.3f}", "", ""],
        ["prepared and verified", shown["verified"], f"{figures['ratio']:.3f}", shown["cpu_seconds"]],
    ]
    cells[-1].append(f"{figures['peak_bytes'] / 2**30:.2f}")
    title = f"{megabytes:,.1f} MB of text; x: ratio to {workers} x encode_ordinary"
    print_table(title, ["what", "MB/s", "x", "CPU s", "peak GiB"], cells)
    return {**figures, "rounds": rounds}


def encode_ordinary(files: list[str], text_field: str, ranks: Path | None) -> Row:
    """Bytes of the documents, and the time that encode_ordinary takes for them, one after the other."""
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
    return {"utf8_bytes": n_bytes, "encode_ordinary_seconds": seconds, "encode_ordinary_cpu_seconds": cpu_seconds}


def prepare_and_verify(options: Any) -> Row:
    """What both commands cost."""
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
        prepared = run("prepare", "scripts/prepare_data.py", *shlex.split(overrides(settings)))
        return prepared | run("verify", "scripts/verify_dataset.py", f"dataset_dir={dataset_dir}")


def run(name: str, *command: str) -> Row:
    """Run a command; returns its seconds, and the CPU seconds and largest memory of all its processes together.

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
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    say(f"{name}: {seconds:.1f} s, {cpu_seconds:.1f} CPU s, {peak / 2**30:.2f} GiB")
    return {f"{name}_seconds": seconds, f"{name}_cpu_seconds": cpu_seconds, f"{name}_peak_bytes": peak}


def resident(pid: int) -> int:
    """Bytes of memory that a process and all its descendants hold; 0 where there is no /proc."""
    total = 0
    with contextlib.suppress(OSError):  # it has just ended
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        total = pages * os.sysconf("SC_PAGE_SIZE")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += sum(map(resident, map(int, (thread / "children").read_text().split())))
    return total
