"""Batches as pure functions: they keep no state between steps, so a restart cannot lose any.

`Prefetch` reads ahead.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from common.numbers import ceil_div
from common.settings import UserError
from data.config import Weights
from data.conversations import Conversations, Ranges
from data.mixture import Mixture, find_owners
from data.permutation import shuffle_places
from data.shards import TokenStream
from data.tokenizers.chat import IGNORED

Batch = tuple[np.ndarray, np.ndarray]


class Windows:
    """A text cut into rows of seq_len targets, the last one filled up: every target once.

    With a `stride`, each window begins that many tokens after the previous one, and only its new
    tokens are targets: except in the first window, every target has at least seq_len - stride
    tokens before it.
    """

    def __init__(self, stream: TokenStream, seq_len: int, stride: int | None = None) -> None:
        self.stream = stream
        self.seq_len = min(seq_len, max(1, stream.n_tokens - 1))  # at most the whole text
        self.stride = min(stride or self.seq_len, self.seq_len)

    def __len__(self) -> int:
        n_targets = self.stream.n_tokens - 1
        return 1 + ceil_div(n_targets - self.seq_len, self.stride) if n_targets > 0 else 0

    def bounds(self, number: int) -> tuple[int, int]:
        """Return [start, stop) of a window's tokens in the split. Targets are one token later."""
        start = number * self.stride
        return start, min(start + self.seq_len, self.stream.n_tokens - 1)

    def ranges(self, number: int) -> Ranges:
        """Return where a window's targets are in the split."""
        start, stop = self.bounds(number)
        return [(start + 1, stop + 1)]

    def read(self, number: int) -> Batch:
        """Return the token ids and targets of a window, int64 (seq_len,).

        A short window is filled with <|endoftext|> and targets that are IGNORED, and so are those
        that the previous window covers.
        """
        token_ids = np.full(self.seq_len, self.stream.eot_id, np.int64)
        targets = np.full(self.seq_len, IGNORED, np.int64)
        start, stop = self.bounds(number)
        tokens = self.stream.read(start, stop + 1)
        token_ids[: stop - start] = tokens[:-1]
        targets[: stop - start] = tokens[1:]
        if start > 0:
            targets[: self.seq_len - self.stride] = IGNORED
        return token_ids, targets


class FullWindows(Windows):
    """The windows of a text to train on. A rest that is shorter than seq_len is left out."""

    def __len__(self) -> int:
        return (self.stream.n_tokens - 1) // self.seq_len

    def owners(self) -> np.ndarray:
        """Return the set that most tokens of each row are from, (n_rows,)."""
        return find_owners(self.stream, len(self), self.seq_len)

    def ranges(self, number: int) -> Ranges:
        """Return where the row's tokens and its last target are in the split."""
        start, stop = self.bounds(number)
        return [(start, stop + 1)]


Rows = FullWindows | Conversations


def open_rows(stream: TokenStream, seq_len: int, loss: str = "all") -> Rows:
    """Return a split's conversations if the loss is on answers, else its windows.

    Args:
        loss: as data.loss in train.py.

    Raises:
        UserError: the split has no row.
    """
    if loss == "answers":
        return Conversations(stream, seq_len)
    if stream.n_tokens < seq_len + 1:
        raise UserError(
            f"{seq_len=} needs {seq_len + 1} tokens, split '{stream.split}' has "
            f"{stream.n_tokens}: lower seq_len or prepare more text"
        )
    return FullWindows(stream, seq_len)


class TrainBatches:
    """The training batches of a run: `batch(step)` depends only on dataset, seed and step.

    Every epoch takes each row of the split exactly once, in its own order; a batch may span two
    epochs. Rows are windows of the text, or with data.loss=answers whole conversations. With a
    `mixture`, every set has epochs of its own.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.mixture: Mixture | None = None
        """None: the corpus as it is."""

    def mix(self, weights: Weights) -> None:
        """Draw sequences from the dataset's sets by their weights. Errors are those of Mixture."""
        stream = self.rows.stream
        sets = stream.manifest.splits[stream.split].sets
        unknown = sorted(weights.keys() - sets.keys())
        if unknown:
            raise UserError(
                f"data.mixture gives a weight to {unknown[0]!r}, which is not a set of "
                f"dataset_dir={stream.dataset_dir}: its sets are {', '.join(sorted(sets))}"
            )
        names = stream.manifest.set_names
        self.mixture = Mixture(self.rows.owners(), names, weights, self.seed)

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> Batch:
        """Return rows [start, stop) of the global batch `step`, counted from 0.

        Returns:
            token_ids and targets, int64 (stop - start, seq_len).
        """
        return _read_rows(self.rows, self.numbers(step, start, stop).tolist())

    def numbers(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return which of the split's rows are [start, stop) of a batch: int64 (stop - start,)."""
        stop = self.batch_size if stop is None else stop
        sequences = step * self.batch_size + np.arange(start, stop)
        if self.mixture is not None:
            return self.mixture.rows(sequences)
        return shuffle_places(sequences, len(self.rows), key=str(self.seed))


def _read_rows(rows: Windows | Conversations, numbers: Sequence[int]) -> Batch:
    """Return the rows with these numbers: token_ids and targets, int64 (n, seq_len)."""
    token_ids = np.empty((len(numbers), rows.seq_len), np.int64)
    targets = np.empty_like(token_ids)
    for place, number in enumerate(numbers):
        token_ids[place], targets[place] = rows.read(number)
    return token_ids, targets


class CutWindows(Windows):
    """Windows without stride, cut into shorter ones: the targets are the same for any seq_len."""

    def __init__(self, whole: Windows, n_windows: int | None, seq_len: int) -> None:
        """Cut `n_windows` of the windows, spread evenly, or all."""
        super().__init__(whole.stream, seq_len)
        self._bounds: list[tuple[int, int]] = []
        for number in _spread(len(whole), n_windows):
            start, stop = whole.bounds(number)
            for first in range(start, stop, seq_len):
                self._bounds.append((first, min(first + seq_len, stop)))

    def __len__(self) -> int:
        return len(self._bounds)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return [start, stop) of a window's tokens in the split."""
        return self._bounds[number]


def _spread(total: int, n: int | None) -> Sequence[int]:
    """Return n numbers below `total`, spread evenly; all if n is None or larger."""
    if n is None or n >= total:
        return range(total)
    return [i * total // n for i in range(n)]


class EvalBatches:
    """Rows of a split to evaluate, in order: all of them, or `n_rows` spread evenly."""

    def __init__(self, rows: Windows | Conversations, n_rows: int | None = None) -> None:
        self.all_rows = rows
        self.stream = rows.stream
        self.seq_len = rows.seq_len
        self._numbers = _spread(len(rows), n_rows)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def loss(self) -> str:
        """Which tokens are targets: "answers" or "all"."""
        return "answers" if isinstance(self.all_rows, Conversations) else "all"

    def ranges(self, number: int) -> Ranges:
        """Return where a row's targets are in the split."""
        return self.all_rows.ranges(self._numbers[number])

    def rows(self, start: int, stop: int) -> Batch:
        """Return rows [start, stop): token_ids and targets, int64 (stop - start, seq_len)."""
        return _read_rows(self.all_rows, self._numbers[start:stop])


def open_eval_batches(
    stream: TokenStream,
    seq_len: int,
    n_rows: int | None = None,
    stride: int | None = None,
    loss: str = "all",
) -> EvalBatches:
    """Return a split's conversations if the loss is on answers, else its windows."""
    if loss == "answers":
        return EvalBatches(Conversations(stream, seq_len), n_rows)
    return EvalBatches(Windows(stream, seq_len, stride), n_rows)


T = TypeVar("T")


class Prefetch(Iterator[T]):
    """A context manager that yields the same items in the same order, up to two made ahead.

    A thread makes them while earlier ones are in use. An error in the thread is raised in place of
    its item. When the context ends, the thread has ended.
    """

    def __init__(self, items: Iterable[T]) -> None:
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
        item = self._ahead[0].result()  # an error stays there for the next call
        self._ahead.popleft()
        self._ahead.append(self._thread.submit(next, self._items))
        return item
