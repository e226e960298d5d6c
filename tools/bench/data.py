"""Times data preparation, with the tokenizer library alone as reference."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from cli import compose, to_dict
from common.command_line import options_of
from common.console import say
from common.settings import UserError, decode
from data.prepare.dataset import PrepareConfig
from data.prepare.items import Unreadable
from data.tokenizer import RankTokenizer, build_tokenizer
from tools.bench.harness import Row

ROOT = Path(__file__).resolve().parents[2]


def measure(options: Any) -> dict[str, list[Row]]:
    """Encode all documents in one thread, and prepare and verify a dataset as a user would, in each
    round."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        dataset_dir = Path(folder, "dataset")
        words = [
            *(options.set or ["data=stdlib", "tokenizer=bytes"]),
            *options_of({"out_dir": str(dataset_dir)}),
        ]
        config = decode(PrepareConfig, to_dict(compose("prepare", words)))
        rounds: list[dict[str, float]] = []
        for _ in range(options.rounds):
            library, n_bytes = encode_alone(config)
            prepared = run("scripts/prepare_data.py", *words)
            verified = run(
                "scripts/verify_dataset.py", *options_of({"dataset_dir": str(dataset_dir)})
            )
            rounds.append(
                {"the library, one thread": library, "prepared": prepared, "verified": verified}
            )
            shutil.rmtree(dataset_dir)
    rate = {what: median(n_bytes / 1e6 / seconds[what] for seconds in rounds) for what in rounds[0]}
    of_all = rate["the library, one thread"] * (config.workers or os.cpu_count() or 1)
    return {
        "data": [
            {"what": what, "MB_per_second": own, "x": own / of_all} for what, own in rate.items()
        ]
    }


def encode_alone(config: PrepareConfig) -> tuple[float, int]:
    """Return the seconds that the tokenizer's library takes for all documents, and their UTF-8
    bytes."""
    tokenizer = build_tokenizer(config.tokenizer)
    encode: Callable[[str], object] = tokenizer.encode
    if isinstance(
        tokenizer, RankTokenizer
    ):  # as tiktoken.get_encoding("gpt2"), whose pattern is not this project's
        ranks = {token: rank for rank, token in enumerate(tokenizer.ranks)}
        encode = tiktoken.Encoding(
            "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={}
        ).encode_ordinary
    n_bytes, seconds = 0, 0.0
    for raw in config.data.documents():
        with contextlib.suppress(Unreadable):
            text = config.data.parse(raw).content
            if not isinstance(text, str):
                raise UserError(
                    f"data={config.data.name} has ids, and this times tokenizers: give a source "
                    "of texts"
                )
            started = time.perf_counter()
            encode(text)
            seconds += time.perf_counter() - started
            n_bytes += len(text.encode())
    return seconds, n_bytes


def run(script: str, *options: str) -> float:
    """Run a script of this repository to its end, and return its seconds.

    Raises:
        UserError: it failed.
    """
    started = time.perf_counter()
    done = subprocess.run([sys.executable, ROOT / script, *options], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{script} failed: {(done.stdout + done.stderr)[-2000:]}")
    say(f"{script}: {time.perf_counter() - started:.1f} s")
    return time.perf_counter() - started
