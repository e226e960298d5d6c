"""metrics.jsonl: a run's numbers, a line for every step."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from common.console import warn
from common.files import file_size, sync_directory
from common.settings import UserError


class MetricsLog:
    """metrics.jsonl: one JSON object per line, never two lines of one kind for one step.

    Training lines have "loss", evaluation lines "val_loss", and other lines "event".

    On a full disk no line is lost and training continues: lines wait in memory until there is room. Only `sync`, which
    a checkpoint relies on, and `close` raise. `sync` may run in another thread, but not during `close`: `write`
    does not wait for the disk.
    """

    def __init__(self, path: Path, resumed_at: int) -> None:
        """Open the log of a run that continues after step `resumed_at`, and drop later lines."""
        self.path = path
        self._warned = False
        self._lock = threading.Lock()  # guards everything here
        new = file_size(path) is None  # refuses a link to another file
        if new and resumed_at > 0:
            warn(f"{path} is missing: the metrics of steps 1 to {resumed_at} are lost")
        if not new:
            _drop_later(path, resumed_at)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        self._synced = os.fstat(self._file).st_size  # bytes on disk
        self._recent = bytearray()  # lines since the last sync, which may still be lost
        self._written = 0  # how many of their bytes are in the file
        if new:
            sync_directory(self.path.parent)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line. Others can read it at once, or as soon as there is room."""
        with self._lock:
            self._recent += (json.dumps(line, allow_nan=False) + "\n").encode()
            try:
                self._write_recent()
            except OSError as error:
                if not self._warned:
                    warn(f"{error}: metrics are kept in memory until they can be written")
                self._warned = True

    def sync(self) -> None:
        """Put every line on disk.

        Raises:
            OSError: this failed for some lines. The next line, and the next call, try them again.
        """
        with self._lock:
            self._write_recent()
            count = len(self._recent)
        try:
            os.fsync(self._file)
        except OSError as error:  # the system may have dropped what it could not write
            with self._lock:
                self._written = 0
            raise self._with_path(error) from None
        with self._lock:
            self._synced, self._written = self._synced + count, self._written - count
            del self._recent[:count]

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: there is still no room for the last lines.
        """
        try:
            self._write_recent()
        finally:
            os.close(self._file)

    def _write_recent(self) -> None:
        """Append the waiting lines in order. After an error, the next call continues where the file ends."""
        try:
            while self._written < len(self._recent):  # a disk that is nearly full takes a part, and then fails
                self._written += os.pwrite(self._file, self._recent[self._written :], self._synced + self._written)
        except OSError as error:
            raise self._with_path(error) from None
        self._warned = False

    def _with_path(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self.path))


def _drop_later(path: Path, step: int) -> None:
    """Cut the file after its last line up to `step`, which needs no room on disk."""
    end, damage = 0, None
    with open(path, "rb") as file:
        for number, text in _numbered_lines(file):
            try:
                later = _parse(path, number, text)["step"] > step
            except UserError as error:  # after a power cut, the lines since the last sync may hold anything
                damage = damage or error
                continue
            if not later and damage is not None:
                raise damage
            end = end if later else file.tell()
    os.truncate(path, end)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics.jsonl, one at a time. An incomplete last line, left by a crash, is ignored.

    Raises:
        UserError: a line is damaged.
    """
    with open(path, "rb") as file:
        for number, text in _numbered_lines(file):
            yield _parse(path, number, text)


def _numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the whole lines that are not empty."""
    lines = enumerate(file, start=1)
    return ((number, text) for number, text in lines if text.endswith(b"\n") and text.strip())


def _parse(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        line: dict[str, Any] = json.loads(text.decode(errors="replace"))
        if type(line["step"]) is not int:
            raise TypeError("its step is not an integer")
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        remedy = "fix or delete that line, or use another run_dir"
        raise UserError(f"{path} is damaged in line {number} ({error}): {remedy}") from None
    return line
