"""Documents to token ids: batches in input order, through worker processes, a bounded number of them in memory."""

import functools
import hashlib
import itertools
import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.shards import SplitName, token_dtype
from data.sources import Document, Documents, Unreadable
from data.tokenizer import Tokenizer, load_tokenizer

_BATCH_CHARACTERS = 2**20
_BATCHES_WORTH_WORKERS = 16  # fewer are tokenised in less time than worker processes take to start


class Encoded(NamedTuple):
    """One document ready to be written."""

    split: SplitName
    set_name: str
    utf8_bytes: int
    ids: np.ndarray
    """Token ids (n,), <|endoftext|> last."""


class Skipped:
    """What could not be read: how often for each reason, and where first."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, item: Unreadable) -> None:
        """Count one."""
        self.counts[item.reason] += 1
        self.first.setdefault(item.reason, item.where)


def document_split(utf8: bytes, val_fraction: float) -> SplitName:
    """The split of a document, by a hash of its text alone: the same wherever and whenever it turns up."""
    uniform = int.from_bytes(hashlib.blake2b(utf8, digest_size=8).digest(), "little") / 2**64
    return "val" if uniform < val_fraction else "train"


def encode_batch(tokenizer: Tokenizer, val_fraction: float, batch: list[Document]) -> list[Encoded]:
    """Tokenise documents, in order."""
    dtype = token_dtype(tokenizer.n_vocab)
    encoded = []
    for text, set_name in batch:
        utf8 = text.encode()
        ids = np.array([*tokenizer.encode(text), tokenizer.eot_id], dtype)
        encoded.append(Encoded(document_split(utf8, val_fraction), set_name, len(utf8), ids))
    return encoded


def batches(documents: Documents, skipped: Skipped) -> Iterator[list[Document]]:
    """Group documents into about a million characters, and count those that can't be read."""
    batch: list[Document] = []
    size = 0
    for item in documents:
        if isinstance(item, Unreadable):
            skipped.add(item)
            continue
        batch.append(item)
        size += len(item.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_all(
    groups: Iterator[list[Document]], tokenizer_file: Path, val_fraction: float, workers: int
) -> Iterator[list[Encoded]]:
    """Tokenise in input order, with a bounded number of batches in memory; in this process if there is little to do."""
    head = list(itertools.islice(groups, _BATCHES_WORTH_WORKERS))
    groups = itertools.chain(head, groups)
    if workers == 1 or len(head) < _BATCHES_WORTH_WORKERS:
        yield from map(functools.partial(encode_batch, load_tokenizer(tokenizer_file), val_fraction), groups)
        return
    work = functools.partial(_encode_in_worker, tokenizer_file, val_fraction)
    spawn = multiprocessing.get_context("spawn")  # never copies the threads and locks of this process
    with ProcessPoolExecutor(workers, spawn, _start_worker) as pool:
        pending = deque(pool.submit(work, batch) for batch in itertools.islice(groups, 2 * workers))
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(work, batch) for batch in itertools.islice(groups, 1))


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends its workers


_tokenizer_of_worker = functools.cache(load_tokenizer)


def _encode_in_worker(tokenizer_file: Path, val_fraction: float, batch: list[Document]) -> list[Encoded]:
    return encode_batch(_tokenizer_of_worker(tokenizer_file), val_fraction, batch)
