"""Ends a run of several processes when one of them fails or hangs, and names that process.

Each process has a thread that sends a beat to a store which all share. Whoever waits too long reads the beats, and
publishes a verdict. A process that fails publishes one, too. Every process that reads a verdict ends.
"""

import contextlib
import faulthandler
import json
import math
import os
import socket
import threading
import time
from typing import Any, NamedTuple

from common.exits import AGAIN

_PATIENCE = 16
"""Beats that a process lets pass before it acts: all processes may have been suspended, and go on one by one."""
_ANSWER_SECONDS = 2.0
"""How long the store has to answer the main thread."""
_KEEP_STORE_SECONDS = 3.0
"""How long a process that hosts the store stays for the others, at most."""


class Beat(NamedTuple):
    """What a process reports about itself all the time."""

    rank: int
    who: str
    """The process by rank, host and process id."""
    time: float
    """When it was sent, in seconds since 1970: if it is old, the process was stopped or its machine is gone."""
    place: str
    """Where its main thread is."""
    seconds: float
    """How long it has been there."""
    collectives: int
    """How many collective operations it has begun. The others wait for the process that has begun the fewest."""
    finished: bool = False


class Verdict(NamedTuple):
    """Why all processes end. Only the first verdict published is used."""

    ranks: list[int]
    """The processes that the others wait for, empty if they cannot be told apart; or the one that failed."""
    line: str
    by: int
    """The process that publishes it. If a process hangs, this one prints the line."""
    failed: bool = False
    """Whether a process has failed: then all others print the line, and a person must act."""


def judge(beats: list[Beat], now: float, hang_seconds: float) -> tuple[list[int], str] | None:
    """Decide which processes keep the others waiting.

    Args:
        beats: the last beat of each process.
        now: in seconds since 1970. The clocks of machines may differ by half of hang_seconds.

    Returns:
        Ranks and line of a verdict; None if the processes that the others wait for do make progress.
    """
    beats = [beat for beat in beats if not beat.finished]
    fewest, most = (limit(beat.collectives for beat in beats) for limit in (min, max))
    last = [beat for beat in beats if beat.collectives == fewest]
    if blamed := [beat for beat in beats if now - beat.time > hang_seconds / 2]:
        what = "does not answer (stopped, or its machine is gone), last seen {}"
    elif any(beat.seconds <= hang_seconds for beat in last):
        return None
    elif fewest < most:
        blamed, what = last, "hangs, {}, and others wait for it"
    else:
        places = " and ".join(sorted({f"'{beat.place}'" for beat in beats}))
        return [], f"all processes hang at {places}, none behind the others"
    said = (f"{beat.who} " + what.format(f"{beat.seconds:.0f} s at '{beat.place}'") for beat in blamed)
    return [beat.rank for beat in blamed], "; ".join(said)


class Watchdog:
    """A thread that reports where this process is, and ends it when another process fails or the run hangs."""

    def __init__(self, store: Any, group: Any, hang_seconds: float | None, hosts_store: bool) -> None:
        """Start watching.

        Args:
            store: a torch.distributed.Store that all processes share. It raises RuntimeError when it is gone.
            group: the processes, a torch.distributed.ProcessGroup.
            hang_seconds: how long the main thread may stay at one place; None: forever.
            hosts_store: whether the store ends with this process.
        """
        self.verdict: Verdict | None = None
        """Why all processes end, once this one knows."""
        self._store, self._group, self._rank, self._size = store, group, group.rank(), group.size()
        self._hang_seconds, self._hosts_store = hang_seconds or math.inf, hosts_store
        self._who = f"rank {self._rank} (host {socket.gethostname()}, pid {os.getpid()})"
        self._interval = min(self._hang_seconds / 16, 1.0)
        self._at = ("start", time.monotonic())
        self._end, self._failed = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def at(self, place: str) -> None:
        """Note where the main thread is."""
        self._at = (place, time.monotonic())

    def touch(self) -> None:
        """Note that the main thread is at work where it is, unless all processes end."""
        if self.verdict is None:
            self.at(self._at[0])

    def end(self, failed: bool = False) -> Verdict | None:
        """Stop watching. The others go on without this process or, if it has `failed`, end too.

        Takes bounded time even if the store does not answer. Returns why all processes end, if anything is known.
        """
        self._failed = failed
        self._end.set()
        self._thread.join(_ANSWER_SECONDS)
        return self.verdict

    def let_others_leave(self) -> None:
        """If this process has failed, wait until the others, who may be inside NCCL, have left by its verdict."""
        if self._failed:
            time.sleep((_PATIENCE + 2) * self._interval)

    def let_others_read(self) -> None:
        """Give the others time to read the verdict or, if there is none, to stop using a store that this one hosts."""
        if self.verdict is not None:
            return time.sleep(_KEEP_STORE_SECONDS if self._hosts_store else 2 * self._interval)
        everyone, deadline = [f"done/{rank}" for rank in range(self._size)], time.monotonic() + _KEEP_STORE_SECONDS
        while self._hosts_store and time.monotonic() < deadline and not self._store.check(everyone):
            time.sleep(0.02)

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone; the process group has a timeout of its own
            waited = 0
            while not self._end.wait(self._interval) and self._read_verdict() is None:
                self._beat()
                waited = waited + 1 if self._seconds() > self._hang_seconds else 0
                if waited > _PATIENCE:
                    self._look_around()
            if self.verdict is not None:
                return self._obey(self.verdict)  # the store may end before this process does
            if self._failed:
                line = f"process {self._rank} ended with an error, see its message"
                self._publish(Verdict([self._rank], line, self._rank, failed=True))
            self._beat()
            self._read_verdict()
            self._store.set(f"done/{self._rank}", "")

    def _seconds(self) -> float:
        return time.monotonic() - self._at[1]

    def _beat(self) -> None:
        place, since = self._at
        seconds, begun = time.monotonic() - since, self._group._get_sequence_number_for_group()
        beat = Beat(self._rank, self._who, time.time(), place, seconds, begun, self._end.is_set())
        self._store.set(f"beat/{self._rank}", json.dumps(beat))

    def _look_around(self) -> None:
        """Read all processes' beats and, if some process keeps the others waiting, publish a verdict."""
        keys = [f"beat/{rank}" for rank in range(self._size)]
        if self._store.check(keys):  # else some never started: the process group's own timeout is for them
            beats = [Beat(*json.loads(self._store.get(key))) for key in keys]
            if blamed := judge(beats, time.time(), self._hang_seconds):
                self._publish(Verdict(*blamed, by=self._rank))

    def _publish(self, verdict: Verdict) -> None:
        self._store.compare_set("verdict", "", json.dumps(verdict))

    def _read_verdict(self) -> Verdict | None:
        if self._store.check(["verdict"]):
            self.verdict = Verdict(*json.loads(self._store.get("verdict")))
        return self.verdict

    def _obey(self, verdict: Verdict) -> None:
        """End this process. After a failure, wait as long as its main thread makes progress, or ends by itself."""
        patience = _PATIENCE * self._interval
        while verdict.failed and not self._end.wait(patience):
            if self._seconds() > patience:
                _print(f"error: process {self._rank} stops: {verdict.line}")
                self.let_others_read()
                os._exit(1)
        if verdict.failed:
            return
        if self._rank in verdict.ranks or not verdict.ranks:
            _print(f"{self._who} makes no progress; its threads are at:")
            faulthandler.dump_traceback(file=2, all_threads=True)
        if self._rank == verdict.by:
            _print(f"error: {verdict.line}: start the same command again")
        self.let_others_read()
        os._exit(AGAIN)


def _print(line: str) -> None:
    """Write to standard error without Python's locks, which the main thread may hold."""
    os.write(2, f"{line}\n".encode())
