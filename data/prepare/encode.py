"""From documents to token ids: worker processes tokenize batches, which come back in input order."""

import hashlib
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.settings import UserError
from data.chat import ChatTokenizer
from data.prepare.items import OUT_OF_RANGE, Position, Raw, Unreadable
from data.prepare.sources import Source
from data.shards import token_dtype
from data.tokenizer import Tokenizer, load_tokenizer

LONG = 2**24
"""An item of more characters is encoded alone, in this process, so that few such items are in memory at a time."""
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
    place: float
    """From 0 to 1. It depends on the text alone, and decides the split."""
    was_ended: bool = False
    """Whether it was made elsewhere, with the id that ends it."""


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


def document_place(utf8: bytes) -> float:
    """Return the place of a text among all texts, from 0 to 1: a hash."""
    return int.from_bytes(hashlib.blake2b(utf8, digest_size=16).digest()[:8], "little") / 2**64


def encode_all(
    source: Source,
    raws: Iterator[Raw],
    tokenizer_file: Path,
    workers: int,
    piece: int | None = None,
) -> Iterator[list[Item]]:
    """Tokenize items of a source in order, some at a time, with a bounded number of documents in memory.

    Args:
        workers: processes that parse and tokenize. The first items, and long ones, are encoded in this process.
        piece: about how many characters long documents are cut into; None: not cut.

    Raises:
        UserError: a worker process was killed.
    """
    spawn = multiprocessing.get_context(
        "spawn"
    )  # never copies the threads and locks of this process
    # Workers get the tokenizer's file: the start of a process waits until it has read all that it is given.
    given = source, tokenizer_file, piece
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, given)  # starts workers as needed
    tokenizer = load_tokenizer(tokenizer_file)
    pending: deque[Future[list[Item]]] = deque()
    try:
        for number, some in enumerate(_of_equal_size(raws)):
            is_ids = isinstance(
                some[0].content, np.ndarray
            )  # they take longer to send than to check
            here = is_ids or workers == 1 or number < _BATCHES_WORTH_WORKERS or some[0].size > LONG
            while pending and (here or len(pending) >= 2 * workers):
                yield pending.popleft().result()
            if here:
                yield _encode(source, tokenizer, piece, some)
            else:
                pending.append(_submit(pool, some))
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        fewer = max(1, workers // 2)
        raise UserError(
            f"a worker process was killed, perhaps because memory ran out: try workers={fewer}"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _of_equal_size(raws: Iterator[Raw]) -> Iterator[list[Raw]]:
    """Yield items in lists of about a million characters each; a long item is alone."""
    some: list[Raw] = []
    size = 0
    for raw in raws:
        if some and (raw.size > LONG or size >= _BATCH_CHARACTERS or len(some) >= _BATCH_ITEMS):
            yield some
            some, size = [], 0
        some.append(raw)
        size += raw.size
    if some:
        yield some


def _submit(pool: ProcessPoolExecutor, raws: list[Raw]) -> Future[list[Item]]:
    """Submit items. Workers start here and inherit the blocked SIGINT: Ctrl-C is handled by this process alone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_encode_in_worker, raws)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _encode(source: Source, tokenizer: Tokenizer, piece: int | None, raws: list[Raw]) -> list[Item]:
    """Parse and tokenize items."""
    items: list[Item] = []
    for raw in raws:
        try:
            text, set_name = source.parse(raw)
            if isinstance(text, list):
                assert isinstance(tokenizer, ChatTokenizer)
                found = [*_given(np.array(tokenizer.encode_chat(text)), tokenizer, None)]
            elif not isinstance(text, str):
                found = [*_given(text, tokenizer, piece)]
            elif tokenizer.name == "none":
                raise UserError(
                    f"{raw.position} is text, and tokenizer=none takes ids: give the tokenizer to use"
                )
            else:
                found = [*_tokenized(text, tokenizer, piece)]
        except Unreadable as error:
            items.append(Skipped(raw.position, str(error), error.about))
            continue
        except UnicodeEncodeError:  # JSON's "\ud800" is half a character, which UTF-8 cannot hold
            items.append(Skipped(raw.position, "lone surrogate"))
            continue
        items += [Encoded(raw.position, set_name, *each) for each in found]
    return items


def _tokenized(
    text: str, tokenizer: Tokenizer, piece: int | None
) -> Iterator[tuple[np.ndarray, int, float]]:
    """Yield what Encoded has of a document, or of each of its pieces."""
    dtype = token_dtype(tokenizer.n_vocab)
    for each in map(tokenizer.normalized, _cut(text, piece)):
        utf8 = each.encode()
        ids = [ids.astype(dtype) for ids in tokenizer.encode_arrays(each)]
        ids.append(np.array([tokenizer.eot_id], dtype))
        yield np.concatenate(ids), len(utf8), document_place(utf8)


def _given(ids: np.ndarray, tokenizer: Tokenizer, piece: int | None) -> Iterator[tuple[Any, ...]]:
    """Yield what Encoded has of given ids, which may be several documents. Raises Unreadable."""
    if ids.min() < 0 or ids.max() >= tokenizer.n_vocab:
        raise Unreadable(OUT_OF_RANGE)
    ids, eot_id, most = (
        ids.astype(token_dtype(tokenizer.n_vocab)),
        tokenizer.eot_id,
        piece or ids.size,
    )
    for document in np.split(ids, np.flatnonzero(ids[:-1] == eot_id) + 1):
        for start in range(0, document.size, most):
            each = document[start : start + most]
            was_ended = bool(each[-1] == eot_id)
            if not was_ended:
                each = np.append(each, ids.dtype.type(eot_id))
            n_bytes = int(tokenizer.byte_lengths.take(each).sum())
            yield each, n_bytes, document_place(each.tobytes()), was_ended


def _cut(text: str, piece: int | None) -> list[str]:
    """Cut a document's text into pieces: after the end of a line, else after a space, else anywhere."""
    if piece is None:
        return [text]
    some = f".{{{piece},{2 * piece}}}?"
    return re.findall(rf"(?s){some}\n|{some}\s|.{{1,{2 * piece}}}", text)


_of_worker: tuple[Source, Tokenizer, int | None]  # of a worker process


def _start_worker(source: Source, tokenizer_file: Path, piece: int | None) -> None:
    global _of_worker
    _of_worker = source, load_tokenizer(tokenizer_file), piece
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent ends. A killed parent cannot stop its workers itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(raws: list[Raw]) -> list[Item]:
    return _encode(*_of_worker, raws)
