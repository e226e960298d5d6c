"""From compressed text to verified shards, beside tiktoken's own."""

import contextlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common.console import say, show_table
from common.files import make_directory
from common.settings import UserError
from tools.bench.harness import Row, in_turn, table_of, write_results

_SECONDS_BETWEEN_LOOKS = 0.02
ROOT = Path(__file__).resolve().parents[2]


class Cost(NamedTuple):
    """What a command and all its processes took; peak_bytes is of their memory together."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def bench(options: Any) -> None:
    """Measure, print a table, write bench.json."""
    out, workers = make_directory(options.out, "out"), options.workers
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        arguments = options.files, options.text_field, options.ranks
        runs = {"alone": partial(pool.apply, encode_ordinary, arguments), "whole": partial(prepare_and_verify, options)}
        found = in_turn(runs, options.rounds)
    rounds = [alone | whole for alone, whole in zip(found["alone"], found["whole"], strict=True)]
    figures = summary(rounds, workers)
    alone, prepared, verified = (figures[name] for name in ("encode_ordinary", "prepared", "verified"))
    cpu, cpu_alone = figures["cpu_seconds"], figures["encode_ordinary_cpu_seconds"]
    peak = f"{figures['peak_bytes'] / 2**30:.2f}"
    cells = [
        ["encode_ordinary, one thread", f"{alone:.2f}", "", f"{cpu_alone:.1f}", ""],
        [f"prepared, {workers} workers", f"{prepared:.2f}", f"{prepared / workers / alone:.3f}", "", ""],
        ["prepared and verified", f"{verified:.2f}", f"{figures['ratio']:.3f}", f"{cpu:.1f}", peak],
    ]
    title = f"{figures['megabytes']:,.1f} MB of text; x: ratio to {workers} x encode_ordinary"
    show_table(table_of(title, ["what", "MB/s", "x", "CPU s", "peak GiB"], cells))
    write_results(out, options, figures)


def encode_ordinary(files: list[str], text_field: str, ranks: Path | None) -> Row:
    """Bytes of the documents, and the time that encode_ordinary takes for them, one after the other."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    from data.prepare.items import Unreadable
    from data.prepare.sources import JsonlSource
    from data.tokenizer import END_OF_TEXT, GPT2Config, build_tokenizer

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
    say(f"prepared: {prepared}; verified: {verified}")
    costs = {"prepare": prepared, "verify": verified}
    return {f"{name}_{key}": value for name, cost in costs.items() for key, value in cost._asdict().items()}


def run(*command: str) -> Cost:
    """Run a command.

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
    return Cost(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak)


def resident(pid: int) -> int:
    """Bytes of memory that a process and all its descendants hold; 0 where there is no /proc."""
    total = 0
    with contextlib.suppress(OSError):  # it has just ended
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        total = pages * os.sysconf("SC_PAGE_SIZE")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += sum(map(resident, map(int, (thread / "children").read_text().split())))
    return total


def summary(rounds: list[Row], workers: int) -> Row:
    """Median rates in MB/s of text, their ratio, and the largest peak."""
    megabytes = rounds[0]["utf8_bytes"] / 1e6
    alone = [megabytes / r["encode_ordinary_seconds"] for r in rounds]
    verified = [megabytes / (r["prepare_seconds"] + r["verify_seconds"]) for r in rounds]
    return {
        "megabytes": megabytes,
        "encode_ordinary": median(alone),
        "prepared": median(megabytes / r["prepare_seconds"] for r in rounds),
        "verified": median(verified),
        "ratio": median(whole / (workers * one) for whole, one in zip(verified, alone, strict=True)),
        "encode_ordinary_cpu_seconds": median(r["encode_ordinary_cpu_seconds"] for r in rounds),
        "cpu_seconds": median(r["prepare_cpu_seconds"] + r["verify_cpu_seconds"] for r in rounds),
        "peak_bytes": max(max(r["prepare_peak_bytes"], r["verify_peak_bytes"]) for r in rounds),
        "rounds": rounds,
    }
