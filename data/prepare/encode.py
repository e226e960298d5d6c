"""From documents to token ids: worker processes tokenize batches, which come back in input order."""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from common.settings import UserError
from data.prepare.items import Position, Raw, Seen, Unreadable
from data.prepare.sources import Source
from data.shards import token_dtype
from data.tokenizer import Tokenizer, load_tokenizer

LONG = 2**24
"""An item of more characters is encoded alone, in this process, so that few such items are in memory at a time."""
_BATCH_CHARACTERS = 2**20
_BATCH_ITEMS = 10_000
_BATCHES_WORTH_WORKERS = 4  # that are encoded before worker processes start, which takes as long

OnError = Literal["skip", "stop"]


class Encoded(NamedTuple):
    """One document that has been tokenized."""

    position: Position
    set_name: str
    tokens: int
    """How many token ids it has, <|endoftext|> included."""
    utf8_bytes: int
    place: float
    """From 0 to 1. It depends on the text alone, and decides the split."""


class Skipped(NamedTuple):
    """One item that is no document."""

    position: Position
    reason: str

    @property
    def where(self) -> str:
        """Where the item is, for messages."""
        return f"{self.position.input}:{self.position.number}"


class Batch(NamedTuple):
    """Items of the input in order."""

    items: list[Encoded | Skipped]
    """At least one."""
    ids: np.ndarray
    """Token ids of all documents, one after the other, in the type of the shards."""

    def with_ids(self) -> Iterator[tuple[Encoded | Skipped, np.ndarray]]:
        """Yield each item with its token ids."""
        begin = 0
        for item in self.items:
            stop = begin + (item.tokens if isinstance(item, Encoded) else 0)
            yield item, self.ids[begin:stop]
            begin = stop


def document_place(utf8: bytes) -> float:
    """Return the place of a text among all texts, from 0 to 1: a hash."""
    return int.from_bytes(hashlib.blake2b(utf8, digest_size=16).digest()[:8], "little") / 2**64


def encode_all(
    source: Source,
    tokenizer_file: Path,
    workers: int,
    *,
    on_error: OnError = "skip",
    seen: Seen = lambda _: None,
    after: Position | None = None,
    inputs: Sequence[str] | None = None,
) -> Iterator[Batch]:
    """Tokenize all or some inputs of a source in order, with a bounded number of documents in memory.

    Args:
        workers: processes that parse and tokenize; where there is little to do, this process does it alone.
        on_error: whether an item that cannot be read is yielded as Skipped, or ends the run.
        seen: is called with the number of bytes of the input that have been read since the last call.
        after: begin after this position.

    Raises:
        UserError: an item cannot be read, and `on_error` is "stop".
    """
    for batch in _in_order(_groups(source.documents(seen, after, inputs)), source, tokenizer_file, workers):
        for item in batch.items:
            if isinstance(item, Skipped) and on_error == "stop":
                raise UserError(f"{item.where}: {item.reason}: correct it, or skip such items with on_error=skip")
        yield batch


def _groups(raws: Iterator[Raw]) -> Iterator[list[Raw]]:
    """Group items into about a million characters each; a long item is a group of its own."""
    group: list[Raw] = []
    size = 0
    for raw in raws:
        if group and raw.size > LONG:
            yield group
            group, size = [], 0
        group.append(raw)
        size += raw.size
        if size >= _BATCH_CHARACTERS or len(group) >= _BATCH_ITEMS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _in_order(groups: Iterator[list[Raw]], source: Source, tokenizer_file: Path, workers: int) -> Iterator[Batch]:
    """Encode groups in worker processes; the first groups and long items in this process."""
    spawn = multiprocessing.get_context("spawn")  # never copies the threads and locks of this process
    # Workers get the tokenizer's file: the start of a process waits until it has read all that it is given.
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (source, tokenizer_file))  # starts workers as needed
    tokenizer = load_tokenizer(tokenizer_file)
    pending: deque[Future[Batch]] = deque()
    try:
        for number, group in enumerate(groups):
            here = workers == 1 or number < _BATCHES_WORTH_WORKERS or group[0].size > LONG
            while pending and (here or len(pending) >= 2 * workers):
                yield pending.popleft().result()
            if here:
                yield _encode(source, tokenizer, group)
            else:
                pending.append(_submit(pool, group))
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        fewer = max(1, workers // 2)
        raise UserError(f"a worker process was killed, perhaps because memory ran out: try workers={fewer}") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, group: list[Raw]) -> Future[Batch]:
    """Submit a group. Workers start here and inherit the blocked SIGINT: Ctrl-C is handled by this process alone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_encode_in_worker, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _encode(source: Source, tokenizer: Tokenizer, group: list[Raw]) -> Batch:
    """Parse and tokenize a group."""
    dtype = token_dtype(tokenizer.n_vocab)
    end = np.array([tokenizer.eot_id], dtype)
    items: list[Encoded | Skipped] = []
    arrays = [end[:0]]
    for raw in group:
        try:
            text, set_name = source.parse(raw)
            texts = [tokenizer.normalized(piece) for piece in source.cut(text)]
            in_utf8 = [piece.encode() for piece in texts]
        except Unreadable as error:
            items.append(Skipped(raw.position, str(error)))
            continue
        except UnicodeEncodeError:  # JSON's "\ud800" is half a character, which UTF-8 cannot hold
            items.append(Skipped(raw.position, "lone surrogate"))
            continue
        for piece, utf8 in zip(texts, in_utf8, strict=True):
            ids = [*(ids.astype(dtype) for ids in tokenizer.encode_arrays(piece)), end]
            tokens = sum(part.size for part in ids)
            items.append(Encoded(raw.position, set_name, tokens, len(utf8), document_place(utf8)))
            arrays += ids
    return Batch(items, np.concatenate(arrays))


_of_worker: tuple[Source, Tokenizer]  # of a worker process


def _start_worker(source: Source, tokenizer_file: Path) -> None:
    global _of_worker
    _of_worker = source, load_tokenizer(tokenizer_file)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent ends: a parent that is killed cannot do it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(group: list[Raw]) -> Batch:
    return _encode(*_of_worker, group)
