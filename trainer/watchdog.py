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

from trainer.exits import AGAIN

_READINGS = 4
"""How often another process's beat must be found unchanged before it counts as stopped."""


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
    ) -> None:
        """Start watching.

        Args:
            store: shared by all processes.
            hang_seconds: how long the main thread may be at one place.
            collectives: how many collective operations this process has begun.
            kept_by: who keeps the store: named if it does not answer.
        """
        self.verdict: Verdict | None = None
        self._store, self._rank, self._size, self._hang_seconds = store, rank, size, hang_seconds
        self._collectives, self._kept_by = collectives, kept_by
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
        if finished and self._keeps_store:
            with contextlib.suppress(RuntimeError):
                self._let_others_finish()

    def _seconds(self) -> float:
        return time.monotonic() - self._at[1]

    def _watch_others(self) -> None:
        try:
            while not self._stop.is_set():
                self._publish()
                if self._seconds() > self._hang_seconds:
                    self._look_around()
                else:
                    self._others.clear()
                if self._store.check(["verdict"]):
                    self._end(Verdict(**json.loads(self._store.get("verdict"))))
                self._answered = time.monotonic()
                self._stop.wait(self._interval)
            if self._finished:
                self._publish()
        except RuntimeError:  # of the store: the other thread ends the process if it comes to wait
            return

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

    def _let_others_finish(self) -> None:
        """Have the store for as long as the others need to say that they have finished too; not for ever."""
        deadline = time.monotonic() + _READINGS * self._interval
        while not all(beat.finished for beat in self._beats()) and time.monotonic() < deadline:
            time.sleep(0.02)

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
            if self.verdict is None and min(self._seconds(), silent) > self._hang_seconds:
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
