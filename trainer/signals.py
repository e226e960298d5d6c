"""Stop signals: after the first one the run saves and ends, and a second one ends it at once."""

import os
import signal
import threading
import time

from common.console import warn
from common.exits import leave_at_once

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Of schedulers, people and lost terminals. SIGUSR1 can tell a time limit from a cancellation."""


class StopSignals:
    """Records signals while the context lasts.

    A second one ends the process at once, with status 128 + its number. A thread does that, so that
    it works even while the main thread waits for other processes or a disk.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal received."""
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        # One event may send several signals: torchrun forwards what its whole process group has
        # already received, and the system and the shell both tell that a terminal is gone.
        self._echo_seconds = 1.0 if by_torchrun else 0.3
        self._stopping = list(STOPPING)
        under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        if under_nohup and not by_torchrun:
            self._stopping.remove(signal.SIGHUP)

    def __enter__(self) -> "StopSignals":
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._handlers = {
            number: signal.signal(number, lambda *_: None) for number in self._stopping
        }
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
            if byte[0] not in self._stopping:
                continue
            if self.received is None:
                self.received = signal.Signals(byte[0])
                first = time.monotonic()
                warn(f"{self.received.name}: saving and stopping; a second signal stops at once")
            elif time.monotonic() - first >= self._echo_seconds:
                leave_at_once(
                    128 + byte[0],
                    f"{signal.Signals(byte[0]).name}, the second signal: stopped at once; "
                    "the same command resumes from the last save",
                )
