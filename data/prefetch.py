"""Reading ahead, in the background."""

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T], Iterator[T]):
    """The same items in the same order, made by a thread while earlier ones are in use. A context manager.

    The thread is up to two items ahead: one is ready and the next is being made, or waits to take its place. What goes
    wrong in it is raised where its item would have come. When the context ends, the thread has ended.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self.waited = 0.0
        """Seconds that `next` has taken, altogether."""
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
        while not self._ready.empty():  # makes room for the one item that the thread may still be about to hand over
            self._ready.get_nowait()
        self._thread.join()

    def __next__(self) -> T:
        started = time.perf_counter()
        item = self._ready.get()
        self.waited += time.perf_counter() - started
        if isinstance(item, BaseException):
            self._ready.put(item)  # for whoever asks again
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
