"""Times data preparation, with the tokenizer alone as reference."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from cli import compose
from common.command_line import format_value
from common.settings import JsonDict, UserError, decode
from data.prepare.dataset import PrepareConfig
from data.tokenizers.build import build_tokenizer
from tools.bench.measuring import time_call

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_data.py"
_REFERENCE = "the tokenizer, one thread"


def measure_preparation(options: Any) -> list[JsonDict]:
    """Encode all documents in one thread, and prepare a dataset as a user would, in each round."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        dataset_dir = Path(folder, "dataset")
        source = options.set or ["data=stdlib", "tokenizer=bytes"]
        words = [*source, f"out_dir={format_value(str(dataset_dir))}"]
        config = decode(PrepareConfig, compose("prepare", words))
        rates: dict[str, list[float]] = {_REFERENCE: [], "prepared": []}
        for _ in range(options.rounds):
            seconds, n_bytes = encode_alone(config)
            megabytes = n_bytes / 1e6
            rates[_REFERENCE].append(megabytes / seconds)
            rates["prepared"].append(megabytes / time_call(partial(run_script, words)))
            shutil.rmtree(dataset_dir)
    workers = config.workers or os.cpu_count() or 1
    reference = workers * median(rates[_REFERENCE])
    rows: list[JsonDict] = []
    for what, rates_of_rounds in rates.items():
        rate = median(rates_of_rounds)
        rows.append({"what": what, "MB_per_second": rate, "x": rate / reference})
    return rows


def encode_alone(config: PrepareConfig) -> tuple[float, int]:
    """Return the seconds that the tokenizer takes for all documents, and their UTF-8 bytes."""
    tokenizer = build_tokenizer(config.tokenizer)
    n_bytes = 0
    seconds = 0.0
    for raw in config.data.documents([*config.data.inputs()]):
        text: Any = config.data.parse(raw.content).content
        started = time.perf_counter()
        tokenizer.encode(text)
        seconds += time.perf_counter() - started
        n_bytes += len(text.encode())
    return seconds, n_bytes


def run_script(words: list[str]) -> None:
    """Run scripts/prepare_data.py to its end. Raises UserError: it failed."""
    process = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True)
    if process.returncode:
        raise UserError(f"{SCRIPT.name} failed: {(process.stdout + process.stderr)[-2000:]}")
