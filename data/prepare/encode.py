"""Documents to token ids: batches in input order, through worker processes, a bounded number of them in memory."""

import codecs
import functools
import hashlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from common.settings import UserError
from data.prepare.json_lines import LONG
from data.prepare.sources import Position, Raw, Seen, Source, Unreadable
from data.shards import SplitName, token_dtype
from data.tokenizer import Tokenizer, TokenizerFailed, load_tokenizer

_BATCH_CHARACTERS = 2**20
_BATCH_ITEMS = 10_000
_BATCHES_WORTH_WORKERS = 16  # fewer are tokenised in less time than worker processes take to start
_CHUNK = 2**20
_NONE = np.empty(0, np.uint16)

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


def document_digest(utf8: bytes | bytearray) -> bytes:
    """16 bytes that stand for a text."""
    return hashlib.blake2b(utf8, digest_size=16).digest()


def document_place(digest: bytes) -> float:
    """A document's place between 0 and 1, by the hash of its text alone."""
    return int.from_bytes(digest[:8], "little") / 2**64


def document_split(digest: bytes, val_fraction: float) -> SplitName:
    """The split of a document, by its place: the same wherever and whenever it turns up."""
    return "val" if document_place(digest) < val_fraction else "train"


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
    encoder = _Encoder(source, tokenizer_file, val_fraction)
    for packed in _in_order(_groups(source.documents(seen, after)), encoder, workers):
        for item in packed.items:
            if isinstance(item, Unreadable) and on_error == "stop":
                raise UserError(f"{item.where}: {item.reason}: mend it, or count such and go on with on_error=skip")
        yield packed.unpack()


def _groups(raws: Iterator[Raw]) -> Iterator[list[Raw]]:
    """Group items into about a million characters; a long one is alone."""
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


def _in_order(groups: Iterator[list[Raw]], encoder: "_Encoder", workers: int) -> Iterator["_Packed"]:
    """Encode groups here if there are few, else in worker processes; a long item always here, without company."""
    head = []
    for group in groups:
        head.append(group)
        if len(head) == _BATCHES_WORTH_WORKERS or _is_long(group):
            break
    else:
        workers = 1  # this was all
    groups = itertools.chain(head, groups)
    if workers == 1:
        yield from map(encoder.encode, groups)
        return
    spawn = multiprocessing.get_context("spawn")  # never copies the threads and locks of this process
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (encoder,))
    pending: deque[Future[_Packed]] = deque()
    try:
        for group in groups:
            while pending and (len(pending) >= 2 * workers or _is_long(group)):
                yield pending.popleft().result()
            if _is_long(group):
                yield encoder.encode(group)
            else:
                pending.append(_submit(pool, group))
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            f"a worker process was killed, perhaps for want of memory: try workers={workers // 2}"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, group: list[Raw]) -> "Future[_Packed]":
    """Have a group encoded. Workers are started here and inherit that SIGINT is blocked: Ctrl-C is for this process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_encode_in_worker, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_long(group: list[Raw]) -> bool:
    return group[0].size > LONG


class _Packed(NamedTuple):
    """A group of items, encoded, in few objects: they go from process to process."""

    items: list[Encoded | Unreadable]
    """Each with no ids of its own."""
    ids: np.ndarray
    """Of all documents, one after the other."""
    ends: list[int]
    """Where each item's ids end."""
    position: Position

    def unpack(self) -> Batch:
        """Give each document its ids."""
        items: list[Encoded | Unreadable] = []
        start = 0
        for item, end in zip(self.items, self.ends, strict=True):
            items.append(item if isinstance(item, Unreadable) else item._replace(ids=self.ids[start:end]))
            start = end
        return Batch(items, self.position)


class _Encoder:
    """Parses and tokenises."""

    def __init__(self, source: Source, tokenizer_file: Path, val_fraction: float) -> None:
        self.source, self.tokenizer_file, self.val_fraction = source, tokenizer_file, val_fraction

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded where it is used first, which is in a worker process."""
        return load_tokenizer(self.tokenizer_file)

    def encode(self, group: list[Raw]) -> _Packed:
        """Encode a group."""
        dtype = token_dtype(self.tokenizer.n_vocab)
        items: list[Encoded | Unreadable] = []
        ids, ends = bytearray(), []
        for raw in group:
            start = len(ids)
            try:
                items.append(self._encode(raw, ids, dtype))
            except TokenizerFailed:
                del ids[start:]
                items.append(Unreadable("cannot be tokenized", f"{raw.position.input}:{raw.position.number}"))
            ends.append(len(ids) // dtype.itemsize)
        return _Packed(items, np.frombuffer(ids, dtype), ends, group[-1].position)

    def _encode(self, raw: Raw, ids: bytearray, dtype: np.dtype) -> Encoded | Unreadable:
        """Encode one item, its ids at the end of `ids`."""
        document = raw.content if isinstance(raw.content, Unreadable) else self.source.parse(raw)
        if isinstance(document, Unreadable):
            return document
        text = document.text
        utf8 = text.encode() if isinstance(text, str) else text
        for part in self.tokenizer.encode_arrays([text] if isinstance(text, str) else _decoded(text)):
            ids += part.astype(dtype).tobytes()
        ids += np.array([self.tokenizer.eot_id], dtype).tobytes()
        digest = document_digest(utf8)
        split = document_split(digest, self.val_fraction)
        return Encoded(split, document.set_name, len(utf8), _NONE, digest, *raw.position)


def _decoded(utf8: bytearray) -> Iterator[str]:
    return codecs.iterdecode((bytes(utf8[i : i + _CHUNK]) for i in range(0, len(utf8), _CHUNK)), "utf-8")


_encoder: _Encoder  # of a worker process


def _start_worker(encoder: _Encoder) -> None:
    global _encoder
    _encoder = encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed can't end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(group: list[Raw]) -> _Packed:
    return _encoder.encode(group)
