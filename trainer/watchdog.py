"""Finds the process that the others wait for, and ends the run instead of waiting for ever."""

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from common.exits import AGAIN

_READINGS = 4
"""How often another process's beat must be found unchanged before it counts as stopped."""
_LOOK_SECONDS = 2.0
"""How long a process asks at most whether another has failed."""
_LINGER_SECONDS = 5.0
"""How long the store is kept at most for those who have not asked yet."""


class Store(Protocol):
    """What all processes of a run can write to and read from: torch's TCPStore."""

    def set(self, key: str, value: str, /) -> None:
        """Write."""

    def get(self, key: str, /) -> bytes:
        """Read; waits where there is nothing yet."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of the keys were written."""

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Write, unless there is something else than `expected`; returns what is there now."""


@dataclass(frozen=True)
class Beat:
    """What a process says of itself, every few seconds."""

    rank: int
    host: str
    pid: int
    count: int
    """Grows: a process whose count stays as it is was stopped, or its machine is gone."""
    place: str
    """Where its main thread is."""
    seconds: float
    """How long it has been there."""
    collectives: int
    """How many collective operations it has begun. One that has begun fewer than the others is waited for."""
    finished: bool = False

    @property
    def who(self) -> str:
        """The process, as people find it."""
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def where(self) -> str:
        """Its place, and for how long."""
        return f"{self.seconds:.0f} s at '{self.place}'"


@dataclass(frozen=True)
class Verdict:
    """Who is to blame for a hang, on which all processes end."""

    ranks: list[int]
    """Those who are waited for; empty: nobody can be told from the others."""
    speaker: int
    """The process that prints the line."""
    line: str


def judge(beats: list[Beat], stopped: set[int], hang_seconds: float) -> Verdict | None:
    """Who keeps the others waiting.

    Args:
        beats: the last of each process.
        stopped: ranks whose beat was not seen to change.

    Returns:
        None where those who are waited for do move: then it is no hang.
    """
    beats = [beat for beat in beats if not beat.finished]
    fewest, most = (limit(beat.collectives for beat in beats) for limit in (min, max))
    blamed = [beat for beat in beats if beat.rank in stopped]
    if blamed:
        line = "; ".join(
            f"{beat.who} does not answer (stopped, or its machine is gone), last heard of {beat.where}"
            for beat in blamed
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
    speaker = min((beat.rank for beat in beats if beat.rank not in ranks), default=-1)
    return Verdict(ranks, speaker, line)


class Notices:
    """What a process leaves to the others when an error of its own ends it: they must not be started again either."""

    def __init__(self, store: Store, rank: int, size: int, kept_by: str) -> None:
        self.failed: int | None = None
        """The first process that has failed, once that is known here."""
        self._store, self._rank = store, rank
        self._others = [f"knows/{other}" for other in range(size) if other != rank]
        self._keeps_store = kept_by == f"rank {rank}"

    @property
    def line(self) -> str:
        """Why this process ends."""
        return f"error: process {self._rank} stops: process {self.failed} ended with an error, see what it said"

    def post(self) -> None:
        """This process has failed: to be said before the others notice that it is gone."""

        def post() -> None:
            self._store.compare_set("failed", "", str(self._rank))
            self.need_no_more()

        _within(_LOOK_SECONDS, post)

    def look(self) -> int | None:
        """The process that has failed, if any; RuntimeError where there is no store any more."""
        if self.failed is None and self._store.check(["failed"]):
            self.failed = int(self._store.get("failed"))
            self.need_no_more()
        return self.failed

    def look_soon(self) -> int | None:
        """The same in bounded time, store or no store."""
        if self.failed is None:
            _within(_LOOK_SECONDS, self.look)
        return self.failed

    def need_no_more(self) -> None:
        """This process knows, or has finished: nobody need linger for it."""
        self._store.set(f"knows/{self._rank}", "yes")

    def linger(self) -> None:
        """Keep the store, if this process does, until the others know who has failed; not for long."""
        if self._keeps_store:
            # With room for it to end by itself: a thread that is inside the store at exit would abort the process.
            _within(_LINGER_SECONDS + _LOOK_SECONDS, self._wait_for_others)

    def _wait_for_others(self) -> None:
        deadline = time.monotonic() + _LINGER_SECONDS
        while not self._store.check(self._others) and time.monotonic() < deadline:
            time.sleep(0.02)


class Watchdog:
    """Two threads beside the main one: one keeps up with the other processes, one sees to it that the first can."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        hang_seconds: float,
        collectives: Callable[[], int],
        kept_by: str,
        notices: Notices,
    ) -> None:
        """Start watching.

        Args:
            store: shared by all processes.
            hang_seconds: how long the main thread may be at one place.
            collectives: how many collective operations this process has begun.
            kept_by: who keeps the store: named if it does not answer.
            notices: where a process says that it has failed.
        """
        self.verdict: Verdict | None = None
        self._store, self._rank, self._size, self._hang_seconds = store, rank, size, hang_seconds
        self._collectives, self._kept_by, self._notices = collectives, kept_by, notices
        self._keeps_store = kept_by == f"rank {rank}"
        self._interval = min(hang_seconds / 4, 5.0)
        self._at = ("start", time.monotonic())
        self._stop = threading.Event()
        self._finished = False
        self._count = 0
        self._answered = time.monotonic()  # when the store last did
        self._others: list[dict[int, int]] = []  # beats of the last readings, by rank
        self._threads = [
            threading.Thread(target=run, name=run.__name__.strip("_"), daemon=True)
            for run in (self._watch_others, self._watch_store)
        ]
        for thread in self._threads:
            thread.start()

    def at(self, place: str) -> None:
        """Note where the main thread is."""
        self._at = (place, time.monotonic())

    def leave(self) -> None:
        """Watch no more, nor be watched: what the main thread still has to do, it does without the others."""
        self._finished = True
        self._stop.set()

    def stop(self, finished: bool) -> None:
        """End watching: the main thread has `finished`, which the others may know, or has lost contact to them."""
        self._finished = self._finished or finished
        self._stop.set()
        for thread in self._threads:
            thread.join(_READINGS * self._interval)

    def let_others_finish(self) -> None:
        """Have the store, if this process keeps it, as long as the others need to say that they have finished too."""
        deadline = time.monotonic() + _READINGS * self._interval
        with contextlib.suppress(RuntimeError):  # of the store
            while self._keeps_store and time.monotonic() < deadline:
                if all(beat.finished for beat in self._beats()):
                    return
                time.sleep(0.02)

    def _seconds(self) -> float:
        return time.monotonic() - self._at[1]

    def _watch_others(self) -> None:
        with contextlib.suppress(RuntimeError):  # of the store: the other thread ends the process if it comes to wait
            while not self._stop.is_set() and self._notices.look() is None:
                self._beat()
        if self._notices.failed is not None:
            self._end_with_others()
        if self._finished:
            with contextlib.suppress(RuntimeError):
                self._publish()
                self._notices.need_no_more()

    def _beat(self) -> None:
        self._publish()
        if self._seconds() > self._hang_seconds:
            self._look_around()
        else:
            self._others.clear()
        if self._store.check(["verdict"]):
            self._end(Verdict(**json.loads(self._store.get("verdict"))))
        self._answered = time.monotonic()
        next_beat = self._answered + self._interval
        while (left := next_beat - time.monotonic()) > 0 and not self._stop.wait(min(left, 1.0)):
            if self._notices.look() is not None:  # who has failed does not linger for as long as an interval
                return

    def _end_with_others(self) -> None:
        """Another process has failed: end this one, unless its main thread gets on, or notices that by itself."""
        patience = _READINGS * self._interval
        while not self._stop.wait(patience):
            if self._seconds() > patience:
                _print(self._notices.line)
                self._notices.linger()
                os._exit(1)

    def _publish(self) -> None:
        self._count += 1
        place, since = self._at
        seconds = time.monotonic() - since
        host, begun = socket.gethostname(), self._collectives()
        beat = Beat(self._rank, host, os.getpid(), self._count, place, seconds, begun, self._finished)
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))

    def _look_around(self) -> None:
        """Read what all processes say of themselves, and pass a verdict once that was read often enough."""
        beats = self._beats()
        if not beats:
            return  # the group's own timeout is for those who never come
        self._others.append({beat.rank: beat.count for beat in beats})
        if len(self._others) > _READINGS:
            before = self._others.pop(0)
            stopped = {beat.rank for beat in beats if beat.count == before[beat.rank]}
            verdict = judge(beats, stopped - {self._rank}, self._hang_seconds)
            if verdict is not None:
                self._store.compare_set("verdict", "", json.dumps(asdict(verdict)))

    def _beats(self) -> list[Beat]:
        """What all processes last said of themselves; nothing where some have not begun."""
        keys = [f"beat/{rank}" for rank in range(self._size)]
        return [Beat(**json.loads(self._store.get(key))) for key in keys] if self._store.check(keys) else []

    def _end(self, verdict: Verdict) -> None:
        """End this process, once the others have had the time to read the verdict too."""
        self.verdict = verdict
        if self._rank in verdict.ranks or not verdict.ranks:
            self._dump_stacks()
        if self._rank == verdict.speaker:
            _print(f"error: {verdict.line}: start the same command again")
        patience = 4 if self._keeps_store else 2  # the store goes with the process that keeps it
        time.sleep(patience * self._interval)
        os._exit(AGAIN)

    def _watch_store(self) -> None:
        while not self._stop.wait(self._interval):
            silent = time.monotonic() - self._answered
            known = self.verdict is not None or self._notices.failed is not None
            if not known and min(self._seconds(), silent) > self._hang_seconds:
                place, _ = self._at
                self._dump_stacks()
                _print(
                    f"error: rank {self._rank}, {self._seconds():.0f} s at '{place}', gets no further, and "
                    f"{self._kept_by}, which keeps what the processes know of each other, does not answer: "
                    f"start the same command again"
                )
                os._exit(AGAIN)

    def _dump_stacks(self) -> None:
        _print(f"rank {self._rank}, pid {os.getpid()}, gets no further; its threads are at:")
        faulthandler.dump_traceback(file=2, all_threads=True)


def _print(line: Any) -> None:
    """To standard error, whatever locks the main thread holds."""
    os.write(2, f"{line}\n".encode())


def _within(seconds: float, ask: Callable[[], object]) -> None:
    """Ask a store that may be gone, or not answer, in a thread that is not waited for any longer than that."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            ask()

    thread = threading.Thread(target=run, name="ask_store", daemon=True)
    thread.start()
    thread.join(seconds)
