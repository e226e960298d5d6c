"""Reading ahead in a background thread."""

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T], Iterator[T]):
    """Yields the same items in the same order; a thread makes them while earlier ones are in use. A context manager.

    The thread is up to two items ahead: one is ready, and the next is in progress or waits. An error in the thread is
    raised in place of its item. When the context ends, the thread has ended.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self.waited = 0.0
        """Seconds that `next` has taken in total."""
        self._items = items
        self._ready: queue.Queue[tuple[T] | BaseException] = queue.Queue(maxsize=1)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def __enter__(self) -> "Prefetch[T]":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        while not self._ready.empty():  # makes room for an item that the thread may be about to put
            self._ready.get_nowait()
        self._thread.join()

    def __next__(self) -> T:
        started = time.perf_counter()
        item = self._ready.get()
        self.waited += time.perf_counter() - started
        if isinstance(item, BaseException):
            self._ready.put(item)  # for the next call
            raise item
        return item[0]

    def _run(self) -> None:
        try:
            for item in self._items:
                self._ready.put((item,))
                if self._stopped:
                    return
            ended: BaseException = StopIteration()
        except BaseException as error:
            ended = error
        self._ready.put(ended)
