"""From documents to token ids: worker processes tokenize batches, which return in input order."""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.settings import UserError
from data.prepare.items import OUT_OF_RANGE, Document, Position, Raw, Unreadable
from data.prepare.sources import Source
from data.shards import choose_dtype
from data.tokenizers.build import load_tokenizer
from data.tokenizers.chat import ChatTokenizer
from data.tokenizers.interface import Tokenizer

LONG = 2**24
"""An item of more characters is encoded alone, in this process: few are in memory at a time."""
_BATCH_CHARACTERS = 2**20
_BATCH_ITEMS = 10_000
_BATCHES_WORTH_WORKERS = 4  # that are encoded before worker processes start, which takes as long


class Encoded(NamedTuple):
    """One document that has been tokenized."""

    position: Position
    set_name: str
    ids: np.ndarray
    """Its token ids, <|endoftext|> included, in the type of the shards."""
    utf8_bytes: int
    split_hash: float
    """A hash of the text, from 0 to 1, which decides the split."""
    unread: tuple[str, ...] = ()
    """As in Document."""


class Skipped(NamedTuple):
    """One item that is not a document."""

    position: Position
    reason: str
    about: str = ""

    @property
    def where(self) -> str:
        """Where the item is, and what is there, for messages."""
        return f"{self.position}{self.about}"


Item = Encoded | Skipped


def hash_document(content: bytes) -> float:
    """Return a hash of a text, or of its ids, from 0 to 1."""
    digest = hashlib.blake2b(content, digest_size=16).digest()
    return int.from_bytes(digest[:8], "little") / 2**64


def encode_all(
    source: Source, raws: Iterator[Raw], tokenizer_file: Path, workers: int
) -> Iterator[list[Item]]:
    """Tokenize items of a source in order, with a bounded number of documents in memory.

    Args:
        workers: processes that parse and tokenize. The first items, and long ones, are encoded in
            this process.

    Raises:
        UserError: a worker process was killed.
    """
    # A spawned process never copies the threads and locks of this one. Workers get the tokenizer's
    # file: the start of a process waits until it has read all that it is given.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (source, tokenizer_file))
    tokenizer = load_tokenizer(tokenizer_file)
    pending: deque[Future[list[Item]]] = deque()
    try:
        for number, batch in enumerate(_batches(raws)):
            is_ids = isinstance(batch[0].content, np.ndarray)  # sending takes longer than checking
            is_early = workers == 1 or number < _BATCHES_WORTH_WORKERS
            in_this_process = is_ids or is_early or batch[0].size > LONG
            # Results return in input order: what is pending comes before a batch of this process.
            most_pending = 0 if in_this_process else 2 * workers - 1
            while len(pending) > most_pending:
                yield pending.popleft().result()
            if in_this_process:
                yield _encode(source, tokenizer, batch)
            else:
                pending.append(pool.submit(_encode_in_worker, batch))
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        fewer = max(1, workers // 2)
        raise UserError(
            f"a worker process was killed, perhaps because memory ran out: try workers={fewer}"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(raws: Iterator[Raw]) -> Iterator[list[Raw]]:
    """Yield items in lists of about a million characters each; a long item is alone."""
    batch: list[Raw] = []
    size = 0
    for raw in raws:
        is_full = size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_ITEMS
        ends_batch = is_full or raw.size > LONG
        if batch and ends_batch:
            yield batch
            batch = []
            size = 0
        batch.append(raw)
        size += raw.size
    if batch:
        yield batch


def _encode(source: Source, tokenizer: Tokenizer, batch: list[Raw]) -> list[Item]:
    """Parse and tokenize items."""
    items: list[Item] = []
    for raw in batch:
        try:
            items.append(_encode_document(source.parse(raw.content), raw.position, tokenizer))
        except Unreadable as error:
            items.append(Skipped(raw.position, str(error), error.about))
        except UnicodeEncodeError:  # JSON's "\ud800" is half a character, which UTF-8 cannot hold
            items.append(Skipped(raw.position, "lone surrogate"))
    return items


def _encode_document(document: Document, position: Position, tokenizer: Tokenizer) -> Encoded:
    """Tokenize a document, ended by <|endoftext|>. Raises Unreadable or UnicodeEncodeError."""
    content = document.content
    dtype = choose_dtype(tokenizer.n_vocab)
    if isinstance(content, str):
        text = tokenizer.normalized(content)
        hashed = text.encode()
        n_bytes = len(hashed)
        arrays = [*tokenizer.encode_arrays(text), np.array([tokenizer.eot_id])]
        ids = np.concatenate(arrays, dtype=dtype, casting="unsafe")
    else:
        if isinstance(content, list):
            assert isinstance(tokenizer, ChatTokenizer)
            content = np.array(tokenizer.encode_chat(content))
        if content.min() < 0 or content.max() >= tokenizer.n_vocab:
            raise Unreadable(OUT_OF_RANGE)
        ids = content.astype(dtype)
        if ids[-1] != tokenizer.eot_id:
            ids = np.append(ids, dtype.type(tokenizer.eot_id))
        hashed = ids.tobytes()
        n_bytes = int(tokenizer.byte_lengths.take(ids).sum())
    split_hash = hash_document(hashed)
    return Encoded(position, document.set_name, ids, n_bytes, split_hash, document.unread)


_worker_state: tuple[Source, Tokenizer]  # of a worker process


def _start_worker(source: Source, tokenizer_file: Path) -> None:
    global _worker_state
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _worker_state = source, load_tokenizer(tokenizer_file)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent ends. A killed parent cannot stop its workers itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(batch: list[Raw]) -> list[Item]:
    return _encode(*_worker_state, batch)
