"""Says where a slow run is. Ends this process when its run makes no progress, or when another process has failed."""

import contextlib
import faulthandler
import math
import os
import threading
import time
from typing import Any

from common.console import clock, say
from common.exits import AGAIN, leave_at_once

_TICKS = 16
"""Ticks of the thread in the longest time without progress, and those that the main thread has to end by itself."""
_PATIENCE = 15.0
"""Seconds in one step, or one save, after which a line says so. Each line doubles them: a run is slow only once."""
_ANSWER_SECONDS = 2.0
"""How long the store has to answer the main thread."""


class Deadline:
    """A thread that counts the time since any process of the run was last at a new place.

    It counts its own ticks, not the clock's: time in which this process was suspended does not count.
    """

    def __init__(self, seconds: float | None, rank: int = 0, store: Any = None) -> None:
        """Begin to count.

        Args:
            seconds: how long a run may stay where it is; None: forever.
            store: a torch.distributed.Store that all processes share; None: there is only this process.
        """
        self._failed: int | None = None  # the process that has failed, once this one knows
        self._limit, self._rank, self._store = seconds or math.inf, rank, store
        self._tick = min(self._limit / _TICKS, 1.0)
        self._place, self._moved, self._moves = "start", False, 0
        self._end, self._has_failed = threading.Event(), False
        self._step, self._in_step, self._patience = "start", 0.0, _PATIENCE
        self._thread = threading.Thread(target=self._watch, name="deadline", daemon=True)
        self._thread.start()

    def at(self, place: str) -> None:
        """Note that the main thread is at a new place, such as "step 12: forward 1"."""
        self._place, self._moved = place, True

    def stop(self, failed: bool = False) -> str | None:
        """Stop counting: what follows may take any time. If this process has `failed`, tell the others.

        Takes bounded time even if the store does not answer. Returns a line about a process that has failed, or None.
        """
        self._has_failed |= failed
        self._end.set()
        self._thread.join(_ANSWER_SECONDS)
        return None if self._failed is None else self._about_failed()

    def _about_failed(self) -> str:
        return f"process {self._rank} stops: process {self._failed} ended with an error, see its message"

    def wait_for_others(self, size: int, seconds: float) -> None:
        """After `stop`, wait at most so long until all `size` processes are done with the store."""
        until = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):  # it ended with the process that hosted it
            while self._store and not self._thread.is_alive() and time.monotonic() < until:
                if self._store.check([f"done/{rank}" for rank in range(size)]):
                    return
                time.sleep(0.02)

    def _watch(self) -> None:
        seconds = 0.0
        while not self._end.wait(self._tick):
            self._say_if_slow()
            seconds = 0.0 if self._progress() else seconds + self._tick
            if self._failed is not None and not self._end.wait(_TICKS * self._tick):
                leave_at_once(1, self._about_failed())
            if seconds > self._limit:
                faulthandler.dump_traceback(file=2, all_threads=True)
                stuck = f"rank {self._rank} (pid {os.getpid()}) made no progress for {seconds:.0f} s at '{self._place}'"
                longer = "runtime.hang_seconds, if that may take longer"
                leave_at_once(AGAIN, f"{stuck}: start the same command again; raise {longer}")
        self._progress()
        with contextlib.suppress(RuntimeError):  # the store has ended just now
            if self._store is not None:
                self._store.set(f"done/{self._rank}", "")

    def _say_if_slow(self) -> None:
        """Say where the run is, if one step has taken longer than any that was reported before."""
        step = self._place.partition(":")[0]
        self._step, self._in_step = step, self._in_step + self._tick if step == self._step else 0.0
        if self._in_step > self._patience:
            self._patience *= 2
            line = f"{self._place}, {clock(self._in_step)} so far"
            threading.Thread(
                target=say, args=(line,), daemon=True
            ).start()  # this thread must not wait for the output

    def _touch(self) -> None:
        """Note that the main thread is at work where it is, and that what it waits for was announced."""
        self._moved, self._in_step = True, 0.0

    def _progress(self) -> bool:
        """Tell the others what has happened here, and return whether anything has happened anywhere."""
        moved, before, self._moved = self._moved, self._moves, False
        if self._store is None:
            return moved
        try:
            if self._has_failed:
                self._store.compare_set("failed", "", str(self._rank))
            if self._store.check(["failed"]):
                self._failed = int(self._store.get("failed"))
            self._moves = self._store.add("moves", int(moved))
        except RuntimeError:  # it ended with the process that hosted it
            self._store = None
        return moved or self._moves != before
