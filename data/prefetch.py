"""Reading ahead in a background thread."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T], Iterator[T]):
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
