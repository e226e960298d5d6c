"""Verifies a dataset: compares all its files with the sums in its manifest."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.console import Track, count, print_error, say
from common.settings import UserError
from data.shards import MANIFEST, TOKENIZER, check_file, damaged, parse_manifest, total_of
from data.tokenizer import load_tokenizer


def verify_or_exit(dataset_dir: Path) -> None:
    """Print that a dataset is whole, or its problems.

    Raises:
        SystemExit: it has problems; the status is 1.
    """
    problems = verify(dataset_dir)
    for problem in problems:
        print_error(problem)
    if problems:
        raise SystemExit(1)
    manifest = parse_manifest(dataset_dir)
    total = total_of(split.total for split in manifest.splits.values())
    say(
        f"{dataset_dir} is whole: {total.documents:,} documents, {total.tokens:,} tokens, "
        f"{count(len(manifest.set_names), 'set')}, {count(len(manifest.inputs), 'input')}"
    )


def verify(dataset_dir: Path) -> list[str]:
    """Return a line for each damaged file of a dataset."""
    try:
        manifest = parse_manifest(dataset_dir)
        tokenizer = load_tokenizer(dataset_dir / TOKENIZER)
    except UserError as error:
        return [str(error)]
    if tokenizer.id != manifest.tokenizer:
        path = dataset_dir / TOKENIZER
        return [f"{path} is not the tokenizer of {MANIFEST}: prepare the dataset again"]
    files = []
    for split in manifest.splits.values():
        for shard in split.shards:
            files += manifest.files_of(shard)

    def problem_of(file: tuple[str, int, str]) -> str | None:
        name, size, sha256 = file
        path = dataset_dir / name
        try:
            check_file(path, size, sha256)
        except UserError as error:
            return str(error)
        except OSError as error:
            return str(damaged(path, f"it cannot be read ({error.strerror})"))
        return None

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
