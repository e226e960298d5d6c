"""Stop signals: after the first one the run saves and ends, and a second one ends it at once."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time

from common import exits
from common.console import warn
from common.exits import end_process_at_once
from runtime.distributed import is_launched_here

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Of schedulers, people and lost terminals. SIGUSR1 can tell a time limit from a cancellation."""


class StopSignals:
    """Records signals while the context lasts.

    A second one ends the process at once, with status 128 + its number. A thread does that, so that
    it works even while the main thread waits for other processes or a disk.

    The parent of the processes that train leads: it speaks, forwards the first signal to them, and
    ends them at the second. They do neither.
    """

    def __init__(self, leads: bool = False) -> None:
        """`leads`: this process starts those that train."""
        self.received: signal.Signals | None = None
        """The first signal received."""
        self._leads = leads
        self._follows = is_launched_here()
        self._by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and not self._follows
        # One event may send several signals: torchrun forwards what its whole process group has
        # already received, and the system and the shell both tell that a terminal is gone.
        self._echo_seconds = 1.0 if self._by_torchrun else 0.3
        self._stopping = list(STOPPING)
        under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        if under_nohup and not self._by_torchrun:
            self._stopping.remove(signal.SIGHUP)

    def __enter__(self) -> "StopSignals":
        exits.lost_process = False  # by an earlier run of this process
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._handlers = {
            number: signal.signal(number, lambda *_: None) for number in self._stopping
        }
        self._wakeup = signal.set_wakeup_fd(self._writer)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        # In processes that start meanwhile, signals wait until these can handle them.
        how = signal.SIG_BLOCK if self._leads else signal.SIG_UNBLOCK
        self._mask = signal.pthread_sigmask(how, self._stopping)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._leads:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
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
            number = signal.Signals(byte[0])
            if self.received is None:
                self.received = number
                if self._by_torchrun:  # which also sends SIGTERM when it has lost a process
                    time.sleep(self._echo_seconds)
                first = time.monotonic()
                if not self._follows and not exits.lost_process:
                    warn(f"{number.name}: saving and stopping; a second signal stops at once")
                self._forward(number)
            elif not self._follows and time.monotonic() - first >= self._echo_seconds:
                self._forward(signal.SIGKILL)
                end_process_at_once(
                    128 + number,
                    f"{number.name}, the second signal: stopped at once; steps since the last save "
                    "(all, if there is none) are lost, and the same command takes them again",
                )

    def _forward(self, number: signal.Signals) -> None:
        """Send a signal to the processes that this one leads."""
        processes = multiprocessing.active_children() if self._leads else []
        for pid in [process.pid for process in processes if process.pid is not None]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
