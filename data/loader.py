"""Batches as pure functions: they keep no state between steps, so a restart cannot lose any.

`Prefetch` reads ahead.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from common.numbers import ceil_div
from common.settings import UserError
from data.chat import in_answers
from data.mixture import Mixture, Weights, open_mixture
from data.permutation import shuffled
from data.shards import Manifest, TokenStream

IGNORED = -1  # the target of padding, and of what data.loss leaves out

Batch = tuple[np.ndarray, np.ndarray]


def window(stream: TokenStream, start: int, stop: int) -> Batch:
    """Return tokens [start, stop) of a split and the targets after them, int64 (stop - start,)."""
    tokens = stream.read(start, stop + 1)
    token_ids = tokens[:-1]
    targets = tokens[1:]
    if stream.loss == "answers":
        targets = np.where(in_answers(stream, start, token_ids), targets, IGNORED)
    return token_ids, targets


class TrainBatches:
    """The training batches of a run: `batch(step)` depends only on dataset, seed and step.

    The stream is cut into windows of seq_len targets. Every epoch takes each window exactly once,
    in its own order; a batch may span two epochs. With a `mixture`, every set has epochs of its
    own.
    """

    def __init__(self, stream: TokenStream, seq_len: int, batch_size: int, seed: int) -> None:
        """Set up for batches of `batch_size` sequences of `seq_len` tokens.

        Raises:
            UserError: the split is shorter than one window.
        """
        if stream.n_tokens < seq_len + 1:
            raise UserError(
                f"{seq_len=} needs {seq_len + 1} tokens, split '{stream.split}' has "
                f"{stream.n_tokens}: lower seq_len or prepare more text"
            )
        self.stream = stream
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.seed = seed
        self.n_windows = (stream.n_tokens - 1) // seq_len
        self.mixture: Mixture | None = None
        """None: the corpus as it is."""

    def mix(self, dataset_dir: Path, manifest: Manifest, weights: Weights) -> None:
        """Draw sequences from the dataset's sets by their weights. Errors are `open_mixture`'s."""
        self.mixture = open_mixture(dataset_dir, manifest, weights, self.seq_len, self.seed)

    def starts(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return where rows [start, stop) of the batch `step` begin in the split.

        Returns:
            int64 (stop - start,).
        """
        rows = np.arange(start, self.batch_size if stop is None else stop)
        return self.windows(step * self.batch_size + rows) * self.seq_len

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> Batch:
        """Return rows [start, stop) of the global batch `step`.

        Returns:
            token_ids and targets, int64 (stop - start, seq_len).
        """
        begins = self.starts(step, start, stop).tolist()
        token_ids = np.empty((len(begins), self.seq_len), np.int64)
        targets = np.empty_like(token_ids)
        for row, begin in enumerate(begins):
            token_ids[row], targets[row] = window(self.stream, begin, begin + self.seq_len)
        return token_ids, targets

    def windows(self, sequences: np.ndarray) -> np.ndarray:
        """Return the window of each sequence, counted from the run's first: int64 (n,)."""
        if self.mixture is not None:
            return self.mixture.windows(sequences)
        return shuffled(sequences, self.n_windows, key=str(self.seed))


class EvalBatches:
    """A split's windows in order: every target once, or `n_windows` windows spread over the split.

    With a `stride`, each window begins that many tokens after the previous one, and only its new
    tokens are targets: except in the first window, every target has at least seq_len - stride
    tokens before it.
    """

    def __init__(
        self,
        stream: TokenStream,
        seq_len: int,
        n_windows: int | None = None,
        stride: int | None = None,
    ) -> None:
        n_targets = stream.n_tokens - 1
        self.stream = stream
        self.seq_len = min(seq_len, max(1, n_targets))  # no window is longer than the text
        self.stride = min(stride or self.seq_len, self.seq_len)
        self.total = 0
        if n_targets > 0:
            self.total = 1 + ceil_div(n_targets - self.seq_len, self.stride)
        self.n_windows = self.total if n_windows is None else min(n_windows, self.total)

    def __len__(self) -> int:
        return self.n_windows

    @property
    def has_targets(self) -> bool:
        """Whether any window has a target, such as a token of an answer."""
        return any((self.rows(i, i + 1)[1] >= 0).any() for i in range(len(self)))

    def bounds(self, window: int) -> tuple[int, int]:
        """Return [start, stop) of a window's tokens in the split. Targets are one token later."""
        start = window * self.total // self.n_windows * self.stride
        return start, min(start + self.seq_len, self.stream.n_tokens - 1)

    def rows(self, start: int, stop: int) -> Batch:
        """Return windows [start, stop): token_ids and targets, int64 (stop - start, seq_len).

        A short window is filled with <|endoftext|> and targets of -1. Positions that the previous
        window covers also have the target -1.
        """
        n_rows = max(0, stop - start)
        token_ids = np.full((n_rows, self.seq_len), self.stream.eot_id, np.int64)
        targets = np.full((n_rows, self.seq_len), IGNORED, np.int64)
        for row in range(n_rows):
            first, end = self.bounds(start + row)
            length = end - first
            token_ids[row, :length], targets[row, :length] = window(self.stream, first, end)
            if first > 0:
                targets[row, : self.seq_len - self.stride] = IGNORED
        return token_ids, targets


class CutWindows(EvalBatches):
    """The windows of an EvalBatches without stride, cut into shorter ones.

    The targets are the same for any seq_len.
    """

    def __init__(self, whole: EvalBatches, seq_len: int) -> None:
        super().__init__(whole.stream, seq_len)
        self._bounds: list[tuple[int, int]] = []
        for i in range(len(whole)):
            start, stop = whole.bounds(i)
            for first in range(start, stop, seq_len):
                self._bounds.append((first, min(first + seq_len, stop)))
        self.n_windows = len(self._bounds)

    def bounds(self, window: int) -> tuple[int, int]:
        """Return [start, stop) of a window's tokens in the split."""
        return self._bounds[window]


T = TypeVar("T")


class Prefetch(Iterator[T]):
    """A context manager that yields the same items in the same order, up to two made ahead.

    A thread makes them while earlier ones are in use. An error in the thread is raised in place of
    its item. When the context ends, the thread has ended.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self.waited = 0.0
        """Seconds that `next` has taken in total."""
        self._items = iter(items)
        self._ahead: deque[Future[T]] = deque()
        self._thread = ThreadPoolExecutor(1, "prefetch")

    def __enter__(self) -> "Prefetch[T]":
        for _ in range(2):
            self._ahead.append(self._thread.submit(next, self._items))
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
