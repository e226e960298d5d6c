"""Verifies a dataset: compares all its files with the sums in its manifest."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.console import Track, count, print_error, say
from common.settings import UserError
from data.shards import MANIFEST, TOKENIZER, check_file, parse_manifest, sum_counts
from data.tokenizers.build import load_tokenizer


def verify_or_exit(dataset_dir: Path) -> None:
    """Print that a dataset is whole, or its problems.

    Raises:
        SystemExit: it has problems; the status is 1.
    """
    problems = verify_dataset(dataset_dir)
    for problem in problems:
        print_error(problem)
    if problems:
        raise SystemExit(1)
    manifest = parse_manifest(dataset_dir)
    total = sum_counts(split.total for split in manifest.splits.values())
    say(
        f"{dataset_dir} is whole: {total.documents:,} documents, {total.tokens:,} tokens, "
        f"{count(len(manifest.set_names), 'set')}, {count(len(manifest.inputs), 'input')}"
    )


def verify_dataset(dataset_dir: Path) -> list[str]:
    """Return a line for each damaged file of a dataset."""
    try:
        manifest = parse_manifest(dataset_dir)
        tokenizer = load_tokenizer(dataset_dir / TOKENIZER)
    except UserError as error:
        return [str(error)]
    if tokenizer.id != manifest.tokenizer:
        path = dataset_dir / TOKENIZER
        return [f"{path} is not the tokenizer of {MANIFEST}: prepare the dataset again"]
    # The files of all shards, with the sizes and sums that they must have.
    files = []
    for split in manifest.splits.values():
        for shard in split.shards:
            files += manifest.files_of(shard)

    def problem_of(file: tuple[str, int, str]) -> str | None:
        name, size, sha256 = file
        try:
            check_file(dataset_dir / name, size, sha256)
        except (UserError, OSError) as error:
            return str(error)
        return None

    # Threads read and hash at once: hashing holds no lock.
    problems = []
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        with Track("verifying, files", len(files)) as track:
            for problem in pool.map(problem_of, files):
                if problem is not None:
                    problems.append(problem)
                track.advance(1)
    finally:
        pool.shutdown(cancel_futures=True)
    return problems
