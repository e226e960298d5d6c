"""Batches as pure functions: they keep no state between steps, so a restart cannot lose any. `Prefetch` reads ahead."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from common.settings import UserError
from data.chat import in_answers
from data.mixture import Mixture, Weights, open_mixture
from data.permutation import shuffled
from data.shards import Manifest, TokenStream

IGNORED = -1  # the target of padding, and of what data.loss leaves out

Batch = tuple[np.ndarray, np.ndarray]


def window(stream: TokenStream, start: int, stop: int) -> Batch:
    """Return tokens [start, stop) of a split and the targets after them, both int64 (stop - start,)."""
    tokens = stream.read(start, stop + 1)
    token_ids, targets = tokens[:-1], tokens[1:]
    if stream.loss == "answers":
        targets = np.where(in_answers(stream, start, token_ids), targets, IGNORED)
    return token_ids, targets


class TrainBatches:
    """The training batches of a run: `batch(step)` depends only on dataset, seed and step.

    The stream is cut into windows of seq_len targets. Every epoch takes each window exactly once, in its own
    order; a batch may span two epochs. With a `mixture`, every set has epochs of its own.
    """

    def __init__(self, stream: TokenStream, seq_len: int, batch_size: int, seed: int) -> None:
        """Set up for batches of `batch_size` sequences of `seq_len` tokens.

        Raises:
            UserError: the split is shorter than one window.
        """
        if stream.n_tokens < seq_len + 1:
            has = f"split '{stream.split}' has {stream.n_tokens}"
            raise UserError(
                f"{seq_len=} needs {seq_len + 1} tokens, {has}: lower seq_len or prepare more text"
            )
        self.stream, self.seq_len, self.batch_size, self.seed = stream, seq_len, batch_size, seed
        self.n_windows = (stream.n_tokens - 1) // seq_len
        self.mixture: Mixture | None = None
        """None: the corpus as it is."""

    def mix(self, dataset_dir: Path, manifest: Manifest, weights: Weights) -> None:
        """Draw sequences from the dataset's sets by their weights. Errors are those of `open_mixture`."""
        self.mixture = open_mixture(dataset_dir, manifest, weights, self.seq_len, self.seed)

    def starts(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return where rows [start, stop) of the batch `step` begin in the split: int64 (stop - start,)."""
        rows = np.arange(start, self.batch_size if stop is None else stop)
        return self.windows(step * self.batch_size + rows) * self.seq_len

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> Batch:
        """Rows [start, stop) of the global batch `step`: token_ids and targets, int64 (stop - start, seq_len)."""
        begins = self.starts(step, start, stop).tolist()
        token_ids, targets = np.empty((2, len(begins), self.seq_len), np.int64)
        for row, begin in enumerate(begins):
            token_ids[row], targets[row] = window(self.stream, begin, begin + self.seq_len)
        return token_ids, targets

    def windows(self, sequences: np.ndarray) -> np.ndarray:
        """Return the window of each sequence of the run, counted from its first: int64 (n,) -> int64 (n,)."""
        if self.mixture is not None:
            return self.mixture.windows(sequences)
        return shuffled(sequences, self.n_windows, key=str(self.seed))


class EvalBatches:
    """A split's windows in order: every target exactly once, or `n_windows` windows spread evenly over the split.

    With a `stride`, each window begins that many tokens after the previous one, and only its new tokens are targets:
    except in the first window, every target has at least seq_len - stride tokens before it.
    """

    def __init__(
        self,
        stream: TokenStream,
        seq_len: int,
        n_windows: int | None = None,
        stride: int | None = None,
    ) -> None:
        seq_len = min(seq_len, max(1, stream.n_tokens - 1))  # no window is longer than the text
        self.stream, self.seq_len, self.stride = stream, seq_len, min(stride or seq_len, seq_len)
        self.total = (
            1 - (seq_len - stream.n_tokens + 1) // self.stride if stream.n_tokens > 1 else 0
        )
        self.n_windows = self.total if n_windows is None else min(n_windows, self.total)

    def __len__(self) -> int:
        return self.n_windows

    @property
    def has_targets(self) -> bool:
        """Whether any window has a target, such as a token of an answer."""
        return any((self.rows(i, i + 1)[1] >= 0).any() for i in range(len(self)))

    def span(self, window: int) -> tuple[int, int]:
        """Return [start, stop) of a window's tokens in the split. Its targets are one token later."""
        start = window * self.total // self.n_windows * self.stride
        return start, min(start + self.seq_len, self.stream.n_tokens - 1)

    def rows(self, start: int, stop: int) -> Batch:
        """Windows [start, stop): token_ids and targets, int64 (stop - start, seq_len).

        A short window is filled with <|endoftext|> and targets of -1. Positions that the previous window covers
        also have the target -1.
        """
        n_rows = max(0, stop - start)
        token_ids = np.full((n_rows, self.seq_len), self.stream.eot_id, np.int64)
        targets = np.full((n_rows, self.seq_len), IGNORED, np.int64)
        for row in range(n_rows):
            first, end = self.span(start + row)
            token_ids[row, : end - first], targets[row, : end - first] = window(
                self.stream, first, end
            )
            if first:
                targets[row, : self.seq_len - self.stride] = IGNORED
        return token_ids, targets


class CutWindows(EvalBatches):
    """The windows of an EvalBatches without stride, cut into shorter ones. The targets are the same for any seq_len."""

    def __init__(self, whole: EvalBatches, seq_len: int) -> None:
        super().__init__(whole.stream, seq_len)
        spans = map(whole.span, range(len(whole)))
        self._spans = [
            (i, min(i + seq_len, stop))
            for start, stop in spans
            for i in range(start, stop, seq_len)
        ]
        self.n_windows = len(self._spans)

    def span(self, window: int) -> tuple[int, int]:
        """Return [start, stop) of a window's tokens in the split."""
        return self._spans[window]


T = TypeVar("T")


class Prefetch(Iterator[T]):
    """Yields the same items in the same order; a thread makes them while earlier ones are in use. A context manager.

    The thread is up to two items ahead. An error in the thread is raised in place of its item. When the context ends,
    the thread has ended.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self.waited = 0.0
        """Seconds that `next` has taken in total."""
        self._items = iter(items)
        self._ahead: deque[Future[T]] = deque()
        self._thread = ThreadPoolExecutor(1, "prefetch")

    def __enter__(self) -> "Prefetch[T]":
        self._ahead.extend(self._thread.submit(next, self._items) for _ in range(2))
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def __next__(self) -> T:
        started = time.perf_counter()
        item = self._ahead[0].result()  # an error stays there for the next call
        self.waited += time.perf_counter() - started
        self._ahead.popleft()
        self._ahead.append(self._thread.submit(next, self._items))
        return item
