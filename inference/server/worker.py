"""Runs the engine in its own thread, with a queue that many requests share."""

import threading
from collections.abc import Sequence

from inference.engine import Engine
from inference.generation import Generation
from inference.server.responses import ApiError


class Worker(threading.Thread):
    """Runs an engine's turns while it has texts.

    Call `start` first, and `stop` and `join` at the end.
    """

    def __init__(self, engine: Engine, max_queue: int) -> None:
        """`max_queue`: most texts that wait for a place in the engine."""
        super().__init__(name="engine", daemon=True)
        self.engine = engine
        self.max_texts = engine.max_streams + max_queue
        self._changed = threading.Condition()  # guards these three
        self._new: list[Generation] = []
        self._load = (0, 0)
        self._stopping = False

    def stop(self) -> None:
        """End all texts with an error, and accept no more."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def submit(self, generations: Sequence[Generation]) -> None:
        """Accept all of these texts or none.

        Raises:
            ApiError: there are too many texts already, or the worker stops.
        """
        with self._changed:
            if self._stopping:
                raise _stopping()
            n_open = sum(self.load)
            if n_open + len(generations) > self.max_texts:
                raise ApiError(
                    429,
                    f"{n_open} texts are being written or waiting already: "
                    "try again a little later",
                    "queue_full",
                )
            self._new += generations
            self._changed.notify()

    @property
    def load(self) -> tuple[int, int]:
        """Texts that have places, and texts that wait, as of the last turn."""
        n_admitted, n_waiting = self._load
        return n_admitted, n_waiting + len(self._new)

    def turn(self) -> None:
        """Hand new texts to the engine, and run one turn."""
        with self._changed:
            self.engine.submit(self._new)
            self._load = self.load  # new texts are among those that wait
            self._new = []
        try:
            self.engine.turn()
        except Exception as error:  # of no text alone; clients would wait forever
            self.engine.fail(error)
        with self._changed:
            self._load = self.engine.n_admitted, len(self.engine.waiting)

    def run(self) -> None:
        """Run turns until `stop` is called."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or sum(self.load))
                if self._stopping:
                    break
            self.turn()
        self.engine.fail(_stopping())
        for generation in [*self.engine.waiting, *self._new]:
            generation.fail(_stopping())


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping", "stopping")
