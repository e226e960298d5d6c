"""Stop signals: after the first one the run saves its last step and ends, and a second one ends it at once."""

import os
import signal
import threading
import time

from common.console import warn

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that schedulers and people send. SIGUSR1 can tell a time limit from a cancellation."""


class StopSignals:
    """Records signals while the context lasts. A second one ends the process at once, with status 128 + its number.

    A thread does that, so that it works even while the main thread waits for other processes or a disk.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal received."""
        # torchrun forwards signals that its whole process group has already received: these do not count twice.
        self._echo_seconds = 1.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0

    def __enter__(self) -> "StopSignals":
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in STOPPING}
        self._wakeup = signal.set_wakeup_fd(self._writer)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _watch(self) -> None:
        """Read the number of each signal, one byte, from the pipe that Python writes them to."""
        first = 0.0
        while byte := os.read(self._reader, 1):
            if byte[0] not in STOPPING:
                continue
            if self.received is None:
                self.received, first = signal.Signals(byte[0]), time.monotonic()
                warn(f"{self.received.name}: saving and stopping; a second signal stops at once")
            elif time.monotonic() - first >= self._echo_seconds:
                os._exit(128 + byte[0])
