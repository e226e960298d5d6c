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
from typing import Literal, NamedTuple

import numpy as np

from common.settings import UserError
from data.shards import SplitName, token_dtype
from data.sources import Position, Raw, Seen, Source, Unreadable
from data.tokenizer import Tokenizer, load_tokenizer

_BATCH_CHARACTERS = 2**20
_BATCHES_WORTH_WORKERS = 16  # fewer are tokenised in less time than worker processes take to start

OnError = Literal["skip", "stop"]


class Encoded(NamedTuple):
    """One document ready to be written."""

    split: SplitName
    set_name: str
    utf8_bytes: int
    ids: np.ndarray
    """Token ids (n,) in the shards' type, <|endoftext|> last."""
    digest: bytes
    """Of the UTF-8 text, 16 bytes: equal for equal texts alone."""
    input: str
    """Where it came from: a file, a dataset."""
    number: int
    """Of its line or document in that input, from 1."""


class Batch(NamedTuple):
    """Items of the input in order, and the position of the last of them: a run may go on after it."""

    items: list[Encoded | Unreadable]
    position: Position


class Skipped:
    """What could not be read: how often for each reason, and where first."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, item: Unreadable) -> None:
        """Count one."""
        self.counts[item.reason] += 1
        self.first.setdefault(item.reason, item.where)


def document_digest(utf8: bytes) -> bytes:
    """16 bytes that stand for a text."""
    return hashlib.blake2b(utf8, digest_size=16).digest()


def document_split(digest: bytes, val_fraction: float) -> SplitName:
    """The split of a document, by the hash of its text alone: the same wherever and whenever it turns up."""
    uniform = int.from_bytes(digest[:8], "little") / 2**64
    return "val" if uniform < val_fraction else "train"


def encode_all(
    source: Source,
    tokenizer_file: Path,
    val_fraction: float,
    workers: int,
    *,
    on_error: OnError = "skip",
    seen: Seen = lambda _: None,
    after: Position | None = None,
) -> Iterator[Batch]:
    """Tokenise a source in input order, with a bounded number of documents in memory.

    Args:
        workers: processes that parse and tokenise; this process alone does it where there is little to do.
        on_error: whether what can't be read is yielded as Unreadable, or ends it all.
        seen: is told how many more bytes of the input have been read.
        after: begin after this position.

    Raises:
        UserError: something can't be read, and `on_error` is "stop".
    """
    for batch in _encode_groups(_groups(source.documents(seen, after)), source, tokenizer_file, val_fraction, workers):
        for item in batch.items:
            if isinstance(item, Unreadable) and on_error == "stop":
                raise UserError(f"{item.where}: {item.reason}: mend it, or count such and go on with on_error=skip")
        yield batch


def _encode_groups(
    groups: Iterator[list[Raw]], source: Source, tokenizer_file: Path, val_fraction: float, workers: int
) -> Iterator[Batch]:
    head = list(itertools.islice(groups, _BATCHES_WORTH_WORKERS))
    groups = itertools.chain(head, groups)
    if workers == 1 or len(head) < _BATCHES_WORTH_WORKERS:
        yield from map(functools.partial(_encode, source, load_tokenizer(tokenizer_file), val_fraction), groups)
        return
    work = functools.partial(_encode_in_worker, source, tokenizer_file, val_fraction)
    spawn = multiprocessing.get_context("spawn")  # never copies the threads and locks of this process
    with ProcessPoolExecutor(workers, spawn, _start_worker) as pool:
        pending = deque(pool.submit(work, batch) for batch in itertools.islice(groups, 2 * workers))
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(work, batch) for batch in itertools.islice(groups, 1))


def _groups(raws: Iterator[Raw]) -> Iterator[list[Raw]]:
    """Group items into about a million characters."""
    group: list[Raw] = []
    size = 0
    for raw in raws:
        group.append(raw)
        size += raw.size
        if size >= _BATCH_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode(source: Source, tokenizer: Tokenizer, val_fraction: float, group: list[Raw]) -> Batch:
    dtype = token_dtype(tokenizer.n_vocab)
    items: list[Encoded | Unreadable] = []
    for raw in group:
        item = raw.content if isinstance(raw.content, Unreadable) else source.parse(raw)
        if isinstance(item, Unreadable):
            items.append(item)
            continue
        utf8 = item.text.encode()
        ids = np.array([*tokenizer.encode(item.text), tokenizer.eot_id], dtype)
        digest = document_digest(utf8)
        split = document_split(digest, val_fraction)
        items.append(Encoded(split, item.set_name, len(utf8), ids, digest, *raw.position))
    return Batch(items, group[-1].position)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends its workers


_tokenizer_of_worker = functools.cache(load_tokenizer)


def _encode_in_worker(source: Source, tokenizer_file: Path, val_fraction: float, group: list[Raw]) -> Batch:
    return _encode(source, _tokenizer_of_worker(tokenizer_file), val_fraction, group)
