"""Output for people: a rich console and progress bars on a terminal, plain lines everywhere else."""

import functools
import sys
import time
from unicodedata import category

from rich.console import Console
from rich.measure import Measurement
from rich.progress import Progress, TextColumn
from rich.segment import Segments
from rich.table import Table

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

_SECONDS_BETWEEN_LINES = 5.0


def say(message: str) -> None:
    """Print one line. Square brackets are text, not markup."""
    console.print(message, markup=False)


def show(text: str) -> None:
    """Write a model's or a user's text to standard output at once, without wrapping or markup.

    On a terminal, control characters are escaped (\\x1b), because text must not control a terminal. A pipe or a file
    gets the text unchanged. Characters that the output's encoding lacks are escaped too.
    """
    file = sys.stdout
    if file.isatty():
        text = "".join(f"\\x{ord(c):02x}" if category(c) == "Cc" and c not in "\n\t" else c for c in text)
    encoding = getattr(file, "encoding", None) or "utf-8"
    file.write(text.encode(encoding, "backslashreplace").decode(encoding))
    file.flush()


@functools.cache
def say_once(message: str) -> None:
    """Print one line, the first time only: for example, why a slower path was chosen."""
    say(message)


def warn(message: str) -> None:
    """Print one warning line to standard error. Only one of several processes does."""
    if console.quiet:
        return
    errors.print(f"warning: {message}", markup=False, style="yellow")


def print_error(message: object) -> None:
    """Print one error line to standard error."""
    errors.print(f"error: {message}", markup=False, style="red")


class Track:
    """Context manager that shows progress through `total` units and the time left.

    It shows a live bar on a terminal and elsewhere a plain line every few seconds. `total=None`: the end is unknown.
    """

    def __init__(self, what: str, total: int | None, done: int = 0) -> None:
        self.what, self.total, self.done, self.first = what, total, done, done
        self.note = ""
        self.live = console.is_terminal and not console.quiet
        self.started = self.last_line = time.monotonic()
        self._bar = Progress(*Progress.get_default_columns(), TextColumn("{task.fields[note]}"), console=console)

    def __enter__(self) -> "Track":
        if self.live:
            self._task = self._bar.add_task(self.what, total=self.total, completed=self.done, note="")
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            self._bar.stop()
        elif self.last_line > self.started:
            self._print_line()

    def advance(self, units: int, note: str = "") -> None:
        """Add `units` to those done. `note` is shown beside them: the loss, the rate."""
        self.done += units
        self.note = note or self.note
        if self.live:
            self._bar.update(self._task, completed=self.done, note=self.note)
        elif time.monotonic() - self.last_line >= _SECONDS_BETWEEN_LINES:
            self._print_line()

    def _print_line(self) -> None:
        self.last_line = time.monotonic()
        spent = self.last_line - self.started
        counted = f"{self.done:,}" if self.total is None else f"{self.done:,}/{self.total:,}"
        left = ""
        if self.total is not None and self.first < self.done < self.total:
            left = f", {clock(spent / (self.done - self.first) * (self.total - self.done))} left"
        say(f"{self.what} {counted} ({clock(spent)}{left}) {self.note}".rstrip())


def clock(seconds: float) -> str:
    """Format seconds: 0:07, 12:30, 3:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_table(table: Table) -> None:
    """Print a table, fitted to the terminal; elsewhere at its full width."""
    if console.is_terminal:
        console.print(table)
        return
    wide = console.options.update(width=10_000)
    needed = Measurement.get(console, wide, table).maximum
    console.print(Segments(console.render(table, wide.update(width=needed))), end="")
