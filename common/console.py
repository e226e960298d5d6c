"""Output for people: lines, progress and tables."""

import contextlib
import errno
import functools
import io
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO
from unicodedata import category

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import Progress

_WIDTH = None if os.isatty(1) else 10_000  # characters; None: the terminal's

console = Console(width=_WIDTH, markup=False, emoji=False, highlight=False, soft_wrap=True)
errors = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)

has_shown_header = False
"""Whether the lines at a run's start go to its console.log only: an earlier job showed them."""
_log: Path | None = None

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_BARS = 0.1


class _Output(io.FileIO):
    """Standard output or standard error, each write of which may fail."""

    def __init__(self, number: int, lossy: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self._lossy = lossy

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self._lossy:
                return len(data)
            self._lossy = True  # what is left may not fail again when Python ends
            if error.errno == errno.EPIPE:
                raise SystemExit(128 + signal.SIGPIPE) from None
            print_error(f"standard output: {error.strerror}")
            raise SystemExit(1) from None


def guard_output(lossy: bool) -> None:
    """Decide what this process does when its output fails.

    Output fails on a lost terminal, a pipe that nobody reads, or a full disk. Standard error loses
    what cannot be written. Standard output does, too, if it is `lossy`. Otherwise the process ends:
    quietly with SIGPIPE's status for a pipe, as Unix tools do, and else with an error line.
    """
    # A stream may be another program's, such as a test's.
    if sys.__stdout__ and sys.stdout is sys.__stdout__:
        sys.stdout = _guard_stream(sys.__stdout__, lossy)
    if sys.__stderr__ and sys.stderr is sys.__stderr__:
        sys.stderr = _guard_stream(sys.__stderr__, lossy=True)


def _guard_stream(stream: TextIO, lossy: bool) -> TextIO:
    """Return a stream that writes to the same file, in the same encoding."""
    buffer = io.BufferedWriter(_Output(stream.fileno(), lossy))
    in_lines = bool(stream.line_buffering)
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=in_lines)


def say(message: str) -> None:
    """Print one or more lines. Square brackets are text, not markup."""
    console.print(_shown(message))
    log_line(message)


@contextlib.contextmanager
def copy_lines_to(path: Path) -> Iterator[None]:
    """Append lines that are printed meanwhile to this file, once it exists."""
    global _log
    before = _log
    _log = path
    try:
        yield
    finally:
        _log = before


def log_line(message: str) -> None:
    """Append lines to the log only. What cannot be written is lost."""
    if _log is None or console.quiet:
        return
    with contextlib.suppress(OSError):
        file = os.open(_log, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        os.write(file, f"{message}\n".encode())
        os.close(file)


def write_text(text: str) -> None:
    """Write a model's or a user's text to standard output at once, without wrapping or markup."""
    sys.stdout.write(_shown(text))
    sys.stdout.flush()


def _shown(text: str) -> str:
    """Escape control characters (\\x1b) for a terminal, which text must not control."""
    if not sys.stdout.isatty():
        return text
    characters = []
    for c in text:
        controls = category(c) == "Cc" and c not in "\n\t"
        characters.append(f"\\x{ord(c):02x}" if controls else c)
    return "".join(characters)


def count(number: int, noun: str) -> str:
    """Return a number with what it counts: "1 run", "1,200 runs"."""
    plural = "" if number == 1 else "s"
    return f"{number:,} {noun}{plural}"


say_once = functools.cache(say)
"""Prints a line the first time only: for example, why a slower path was chosen."""


def warn(message: str) -> None:
    """Print one warning line to standard error. Only one of several processes does."""
    if not console.quiet:
        _print_beside_bars(f"warning: {message}", "yellow")


warn_once = functools.cache(warn)
"""Prints a warning the first time only."""


def print_error(message: object) -> None:
    """Print one error line to standard error."""
    _print_beside_bars(f"error: {message}", "red")


def _print_beside_bars(line: str, style: str) -> None:
    """Print to standard error; if both are the terminal, by the console that has the bars."""
    has_bars = console.is_interactive and errors.is_terminal and not console.quiet
    (console if has_bars else errors).print(Text(line, style))
    log_line(line)


class Track:
    """Context manager that shows progress through `total` units and the time left.

    A terminal gets a bar. Elsewhere, lines come every few seconds, and after a while every minute.
    `total=None`: the end is unknown.
    """

    lines_beside_bar = False

    def __init__(self, title: str, total: int | None, done: int = 0) -> None:
        self.title = title
        self.total = total
        self.first = done
        self.done = done
        self.printed = done
        self.note = ""
        self.started = time.monotonic()
        self.last_line = self.started
        self.last_drawn = self.started
        self._bars = _bars() if console.is_interactive and not console.quiet else None

    def __enter__(self) -> Self:
        if self._bars:
            self._task = self._bars.add_task(self.title, total=self.total, completed=self.done)
            self._bars.start()
            console.show_cursor()  # a process that is killed could not show it again
        return self

    def __exit__(self, *exception: object) -> None:
        if self.first < self.printed:
            self.flush()
        if self._bars:
            self._bars.remove_task(self._task)
            self._bars.refresh()
            if not self._bars.tasks:
                self._bars.stop()

    def advance(self, units: int, note: str = "") -> None:
        """Advance by `units`. `note` is shown next to the progress: the loss, the rate."""
        self.done += units
        self.note = note or self.note
        now = time.monotonic()
        # Drawing takes longer than many units do.
        if self._bars and now - self.last_drawn >= _SECONDS_BETWEEN_BARS:
            self.last_drawn = now
            rate = (self.done - self.first) / (now - self.started)
            text = f"{Track.line(self)} {rate:,.1f}/s"
            self._bars.update(self._task, completed=self.done, description=text, refresh=True)
        # Lines come less often as time goes by: every 5 seconds at first, then every minute.
        pause = min(max(_SECONDS_BETWEEN_LINES, (now - self.started) / 50), 60.0)
        if now - self.last_line >= pause:
            self.flush()

    def line(self) -> str:
        """Return the line to print."""
        total = "" if self.total is None else f" of {self.total:,}"
        times = [f"{format_seconds(time.monotonic() - self.started)} elapsed", *self.left()]
        return f"{self.title} {self.done:,}{total} ({', '.join(times)}) {self.note}".rstrip()

    def left(self) -> list[str]:
        """Return the time left, as in ["2:00 left"], or nothing if it is unknown."""
        if self.total is None or not self.first < self.done < self.total:
            return []
        seconds_per_unit = (time.monotonic() - self.started) / (self.done - self.first)
        return [f"{format_seconds(seconds_per_unit * (self.total - self.done))} left"]

    def flush(self) -> None:
        """Print a line of what is not printed yet."""
        if self.printed < self.done:
            self.last_line = time.monotonic()
            self.printed = self.done
            print_line = say if self.lines_beside_bar or not self._bars else log_line
            print_line(self.line())


@functools.cache
def _bars() -> "Progress":
    """The bars of all work in progress, one below the other. They are drawn by no thread."""
    from rich.progress import BarColumn, Progress, TextColumn

    text = TextColumn("{task.description}", markup=False)
    return Progress(
        BarColumn(20),
        text,
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def format_seconds(seconds: float) -> str:
    """Format seconds: 0:07, 12:30, 3:05:00."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"


def table_of(texts: Iterable[str], numbers: Iterable[str] = ()) -> Table:
    """Return a table without rows: its columns of texts, then those of numbers."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in texts:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def show_table(table: Table) -> None:
    """Print a table, fitted to the terminal; elsewhere at its full width."""
    console.print(table)
