"""From compressed text to verified shards, beside tiktoken's own."""

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from common.console import console, say
from common.files import make_directory, write_json
from common.settings import UserError

_SECONDS_BETWEEN_LOOKS = 0.02
ROOT = Path(__file__).resolve().parents[2]


def bench(options: argparse.Namespace) -> None:
    """Measure, print a table, write bench.json."""
    out = make_directory(options.out, "--out")
    rounds = []
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for number in range(options.rounds):
            alone = pool.apply(encode_ordinary, (options.files, options.text_field, options.ranks))
            rounds.append({**alone, **prepare_and_verify(options, out)})
            say(f"round {number + 1} of {options.rounds}: {rounds[-1]}")
    figures = summary(rounds, options.workers)
    console.print(table(figures, options.workers))
    write_json(out / "bench.json", {"options": {k: str(v) for k, v in vars(options).items()}, **figures})
    say(f"written to {out / 'bench.json'}")


def encode_ordinary(files: list[str], text_field: str, ranks: Path | None) -> dict[str, float]:
    """Bytes of the documents, and the time that encode_ordinary takes for them, one after the other."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    from data.prepare.sources import JsonlSource, Unreadable
    from data.tokenizer import END_OF_TEXT, GPT2Config, build_tokenizer

    source = JsonlSource(name="jsonl", path=files, text_field=text_field)
    tokenizer = build_tokenizer(GPT2Config(name="gpt2", path=ranks))
    numbered = {token: rank for rank, token in enumerate(tokenizer.ranks)}
    encode = tiktoken.Encoding(  # as tiktoken.get_encoding("gpt2") makes it: not with this project's pattern
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=numbered, special_tokens={END_OF_TEXT: tokenizer.eot_id}
    ).encode_ordinary
    n_bytes, seconds, cpu_seconds = 0, 0.0, 0.0
    for raw in source.documents():
        document = raw.content if isinstance(raw.content, Unreadable) else source.parse(raw)
        if isinstance(document, Unreadable):
            continue
        text = document.text if isinstance(document.text, str) else document.text.decode()
        started, cpu_started = time.perf_counter(), time.process_time()
        encode(text)
        seconds += time.perf_counter() - started
        cpu_seconds += time.process_time() - cpu_started
        n_bytes += len(text.encode())
    return {
        "utf8_bytes": n_bytes,
        "encode_ordinary_seconds": seconds,
        "encode_ordinary_cpu_seconds": cpu_seconds,
    }


def prepare_and_verify(options: argparse.Namespace, out: Path) -> dict[str, float]:
    """Seconds of both commands, seconds of CPU they took, and their peaks of memory in bytes."""
    with tempfile.TemporaryDirectory(dir=out) as folder:
        dataset_dir = Path(folder) / "dataset"
        settings = [
            "data=jsonl",
            f"data.path={json.dumps(options.files)}",
            f"data.text_field={options.text_field}",
            "tokenizer=gpt2",
            f"tokenizer.path={'null' if options.ranks is None else options.ranks}",
            f"out_dir={dataset_dir}",
            f"workers={options.workers}",
        ]
        prepared = run("scripts/prepare_data.py", *settings)
        verified = run("scripts/verify_dataset.py", f"dataset_dir={dataset_dir}")
    names = ("seconds", "cpu_seconds", "peak_bytes")
    figures = {f"prepare_{name}": value for name, value in zip(names, prepared, strict=True)}
    return figures | {f"verify_{name}": value for name, value in zip(names, verified, strict=True)}


def run(*command: str) -> tuple[float, float, int]:
    """Seconds, seconds of CPU and peak memory of a command and all it starts.

    Raises:
        UserError: it failed.
    """
    with tempfile.TemporaryFile("w+") as said:
        started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=said, stderr=said)
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        seconds = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        said.seek(0)
        if process.returncode:
            raise UserError(f"{' '.join(command)} failed: {said.read()[-2000:]}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak


def resident(pid: int) -> int:
    """Bytes of memory that a process and all it has started hold; 0 where there is no /proc."""
    total = 0
    with contextlib.suppress(OSError):  # it has just ended
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        total = pages * os.sysconf("SC_PAGE_SIZE")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += sum(map(resident, map(int, (thread / "children").read_text().split())))
    return total


def summary(rounds: list[dict[str, float]], workers: int) -> dict[str, Any]:
    """Median rates in MB/s of text, their ratio, and the largest peak."""
    megabytes = rounds[0]["utf8_bytes"] / 1e6
    alone = [megabytes / r["encode_ordinary_seconds"] for r in rounds]
    prepared = [megabytes / r["prepare_seconds"] for r in rounds]
    verified = [megabytes / (r["prepare_seconds"] + r["verify_seconds"]) for r in rounds]
    return {
        "megabytes": megabytes,
        "encode_ordinary": statistics.median(alone),
        "prepared": statistics.median(prepared),
        "verified": statistics.median(verified),
        "ratio": statistics.median(whole / (workers * one) for whole, one in zip(verified, alone, strict=True)),
        "encode_ordinary_cpu_seconds": statistics.median(r["encode_ordinary_cpu_seconds"] for r in rounds),
        "cpu_seconds": statistics.median(r["prepare_cpu_seconds"] + r["verify_cpu_seconds"] for r in rounds),
        "peak_bytes": max(max(r["prepare_peak_bytes"], r["verify_peak_bytes"]) for r in rounds),
        "rounds": rounds,
    }


def table(figures: dict[str, Any], workers: int) -> Table:
    """The rates, one below the other."""
    shown = Table(title=f"{figures['megabytes']:,.1f} MB of text; x: ratio to {workers} x encode_ordinary")
    for column in ("what", "MB/s", "x", "CPU s", "peak GiB"):
        shown.add_column(column, justify="left" if column == "what" else "right")
    alone, prepared, verified = (figures[name] for name in ("encode_ordinary", "prepared", "verified"))
    cpu, cpu_alone = figures["cpu_seconds"], figures["encode_ordinary_cpu_seconds"]
    peak = f"{figures['peak_bytes'] / 2**30:.2f}"
    shown.add_row("encode_ordinary, one thread", f"{alone:.2f}", "", f"{cpu_alone:.1f}", "")
    shown.add_row(f"prepared, {workers} workers", f"{prepared:.2f}", f"{prepared / workers / alone:.3f}", "", "")
    shown.add_row("prepared and verified", f"{verified:.2f}", f"{figures['ratio']:.3f}", f"{cpu:.1f}", peak)
    return shown
