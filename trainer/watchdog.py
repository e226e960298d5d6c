"""Ends a run of several processes when one of them fails or hangs, and names that process."""

import contextlib
import faulthandler
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from common.exits import AGAIN

_READINGS = 16
"""A process counts as stopped if this many readings find its beat unchanged."""
_ANSWER_SECONDS = 2.0
"""How long the store has to answer the main thread."""
_KEEP_STORE_SECONDS = 3.0
"""How long a process that hosts the store stays after a failure, for the others to read about it."""


class Beat(NamedTuple):
    """What a process reports about itself all the time."""

    rank: int
    host: str
    pid: int
    number: int
    """Grows with every report: if it does not, the process was stopped or its machine is gone."""
    place: str
    """Where its main thread is."""
    seconds: float
    """How long it has been there."""
    collectives: int
    """How many collective operations it has begun. The others wait for the process that has begun the fewest."""
    finished: bool = False

    @property
    def who(self) -> str:
        """The process by rank, host and process id."""
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def where(self) -> str:
        """Its place, and for how long."""
        return f"{self.seconds:.0f} s at '{self.place}'"


class Verdict(NamedTuple):
    """Why all processes end. Only the first verdict published is used."""

    ranks: list[int]
    """The processes that the others wait for, empty if they cannot be told apart; or the one that failed."""
    line: str
    speaker: int | None = None
    """The process that prints the line; None: one has failed, and all others print it."""


def judge(beats: list[Beat], stopped: set[int], hang_seconds: float) -> Verdict | None:
    """Decide which processes keep the others waiting.

    Args:
        beats: the last beat of each process.
        stopped: ranks whose beat did not change.

    Returns:
        None if the processes that the others wait for do make progress.
    """
    beats = [beat for beat in beats if not beat.finished]
    fewest, most = (limit(beat.collectives for beat in beats) for limit in (min, max))
    blamed = [beat for beat in beats if beat.rank in stopped]
    if blamed:
        line = "; ".join(
            f"{beat.who} does not answer (stopped, or its machine is gone), last seen {beat.where}" for beat in blamed
        )
    elif any(beat.seconds <= hang_seconds for beat in beats if beat.collectives == fewest):
        return None
    elif fewest < most:
        blamed = [beat for beat in beats if beat.collectives == fewest]
        line = "; ".join(f"{beat.who} hangs, {beat.where}, and others wait for it" for beat in blamed)
    elif len({beat.place for beat in beats}) == 1:
        line = f"all processes hang at '{beats[0].place}', none behind the others"
    else:
        places = "; ".join(f"{beat.who}, {beat.where}" for beat in beats)
        line = f"all processes hang, none behind the others: {places}"
    ranks = [beat.rank for beat in blamed]
    return Verdict(ranks, line, speaker=min((beat.rank for beat in beats if beat.rank not in ranks), default=-1))


class Watchdog:
    """A thread that reports where this process is, and ends it when another process fails or the run hangs."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        hang_seconds: float | None,
        collectives: Callable[[], int],
        hosts_store: bool,
    ) -> None:
        """Start watching.

        Args:
            store: a torch.distributed.Store that all processes share. It raises RuntimeError when it is gone.
            hang_seconds: how long the main thread may stay at one place; None: forever.
            collectives: returns how many collective operations this process has begun.
            hosts_store: whether the store ends with this process.
        """
        self.verdict: Verdict | None = None
        """Why all processes end, once this one knows."""
        self._store, self._rank, self._size = store, rank, size
        self._hang_seconds, self._collectives, self._hosts_store = hang_seconds or math.inf, collectives, hosts_store
        self._interval = min(self._hang_seconds / 16, 1.0)
        self._at = ("start", time.monotonic())
        self._stop = threading.Event()
        self._finished = False
        self._count = 0
        self._readings: list[dict[int, int]] = []  # the last counts of all processes, by rank
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """The error message of a process that stops because another one failed."""
        if self.verdict is None or self.verdict.speaker is not None:
            return None
        return f"error: process {self._rank} stops: {self.verdict.line}"

    def at(self, place: str) -> None:
        """Note where the main thread is."""
        self._at = (place, time.monotonic())

    def report_failure(self) -> None:
        """Tell the others that this process has failed, before they notice that it is gone."""
        line = f"process {self._rank} ended with an error, see its message"
        self._ask_store(lambda: self._publish(Verdict([self._rank], line)))

    def ask(self) -> Verdict | None:
        """Why all processes end, if anything is known."""
        self._ask_store(self._read_verdict)
        return self.verdict

    def leave(self) -> None:
        """Stop watching, and let the others go on without this process."""
        self._finished = True
        self._stop.set()

    def stop(self, finished: bool) -> None:
        """End the thread. `finished` is False if contact to the others was lost."""
        self._finished = self._finished or finished
        self._stop.set()
        self._thread.join(_READINGS * self._interval)

    def keep_store(self) -> None:
        """If this process hosts the store and a process has failed, give the others time to read the verdict."""
        if self._hosts_store and self.failure is not None:
            time.sleep(_KEEP_STORE_SECONDS)

    def _ask_store(self, ask: Callable[[], object]) -> None:
        """Ask the store from the main thread, in bounded time even if it does not answer."""

        def run() -> None:
            with contextlib.suppress(RuntimeError):
                ask()

        thread = threading.Thread(target=run, name="ask_store", daemon=True)
        thread.start()
        thread.join(_ANSWER_SECONDS)

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone; the process group has a timeout of its own
            while not self._stop.wait(self._interval) and self._read_verdict() is None:
                self._beat()
                if self._seconds() > self._hang_seconds:
                    self._look_around()
                else:
                    self._readings.clear()
        if self.failure is not None:
            self._end_after_failure()
        elif self.verdict is not None:
            self._end_after_hang(self.verdict)
        elif self._finished:
            with contextlib.suppress(RuntimeError):
                self._beat()

    def _seconds(self) -> float:
        return time.monotonic() - self._at[1]

    def _beat(self) -> None:
        self._count += 1
        place, since = self._at
        seconds, begun = time.monotonic() - since, self._collectives()
        beat = Beat(self._rank, socket.gethostname(), os.getpid(), self._count, place, seconds, begun, self._finished)
        self._store.set(f"beat/{self._rank}", json.dumps(beat))

    def _look_around(self) -> None:
        """Read all processes' beats and, if some process keeps the others waiting, publish a verdict."""
        keys = [f"beat/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):
            return  # some processes never started: the process group's own timeout is for them
        beats = [Beat(*json.loads(self._store.get(key))) for key in keys]
        self._readings.append({beat.rank: beat.number for beat in beats})
        if len(self._readings) > _READINGS:
            before = self._readings.pop(0)
            stopped = {beat.rank for beat in beats if beat.number == before[beat.rank]}
            verdict = judge(beats, stopped - {self._rank}, self._hang_seconds)
            if verdict is not None:
                self._publish(verdict)

    def _publish(self, verdict: Verdict) -> None:
        self._store.compare_set("verdict", "", json.dumps(verdict))
        self._read_verdict()

    def _read_verdict(self) -> Verdict | None:
        if self._store.check(["verdict"]):
            self.verdict = Verdict(*json.loads(self._store.get("verdict")))
        return self.verdict

    def _end_after_failure(self) -> None:
        """End this process, unless its main thread makes progress or notices the failure by itself."""
        patience = _READINGS * self._interval
        while not self._stop.wait(patience):
            if self._seconds() > patience:
                _print(str(self.failure))
                self.keep_store()
                os._exit(1)

    def _end_after_hang(self, verdict: Verdict) -> None:
        """End this process, after the others had time to read the verdict too."""
        if self._rank in verdict.ranks or not verdict.ranks:
            _print(f"rank {self._rank}, pid {os.getpid()}, makes no progress; its threads are at:")
            faulthandler.dump_traceback(file=2, all_threads=True)
        if self._rank == verdict.speaker:
            _print(f"error: {verdict.line}: start the same command again")
        time.sleep((4 if self._hosts_store else 2) * self._interval)
        os._exit(AGAIN)


def _print(line: str) -> None:
    """Write to standard error without Python's locks, which the main thread may hold."""
    os.write(2, f"{line}\n".encode())
