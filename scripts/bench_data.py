"""From compressed text to verified shards: the rate beside the tokenizer library's own, and the memory it takes.

    python scripts/bench_data.py files='pile/*.jsonl.zst' ranks=gpt2.tiktoken workers=2
    python scripts/bench_data.py files='pile/*.jsonl.zst' tokenizer_json=tokenizer.json workers=2

Each round encodes the documents with tiktoken's encode_ordinary in one thread of one process, which has them in memory,
and then runs scripts/prepare_data.py and scripts/verify_dataset.py as a user would: the time includes starting Python,
decompressing, parsing, hashing, writing and verifying. Medians are over the rounds. Memory is the largest sum of the
resident sets of the command and all its processes, read every 20 ms: shared pages count for each process.
"""

import os
from pathlib import Path

from pydantic import PositiveInt

from common.command import Items, Settings, run_script


class Options(Settings):
    files: Items[str]
    """globs of .jsonl, .jsonl.gz or .jsonl.zst files, with the key text in each line"""
    ranks: Path | None = None
    """GPT-2's rank file; null: tiktoken downloads it"""
    tokenizer_json: Path | None = None
    """this tokenizer instead: beside encode_batch_fast of Hugging Face's tokenizers, with a thread for each worker"""
    workers: PositiveInt = os.cpu_count() or 1
    """worker processes of scripts/prepare_data.py; default: one per CPU"""
    rounds: PositiveInt = 3
    """measurements of each"""
    out: Path = Path("runs/bench_data")
    """folder for bench.json and the dataset"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.bench.data:bench")
