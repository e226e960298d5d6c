"""metrics.jsonl: a run's numbers, a line for every step."""

import contextlib
import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from common.console import warn
from common.files import file_size, sync_directory, write_atomic
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
        self._open(resumed_at)

    def _open(self, step: int) -> None:
        """Open the file, cut to its lines up to `step`."""
        new = file_size(self.path) is None  # refuses a link to another file
        if new and step > 0:
            warn(f"{self.path} is missing: the numbers of steps 1 to {step} are lost")
        if not new:
            _drop_later(self.path, step)
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
                    warn(f"{error}: lines wait in memory until they can be written")
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
        """Append the waiting lines in order. A line that cannot be written whole is not in the file."""
        try:
            while self._written < len(self._recent):  # a disk that is nearly full takes a part, and then fails
                self._written += os.pwrite(self._file, self._recent[self._written :], self._synced + self._written)
        except OSError as error:
            self._written = self._recent.rfind(b"\n", 0, self._written) + 1
            with contextlib.suppress(OSError):  # the next try overwrites what is left
                os.ftruncate(self._file, self._synced + self._written)
            raise self._with_path(error) from None
        self._warned = False

    def _with_path(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self.path))


def _drop_later(path: Path, step: int) -> None:
    """Keep the lines up to `step`. Usually the others come last, and cutting them off needs no room on disk."""
    content, kept = path.read_bytes(), bytearray()
    damage: UserError | None = None
    for number, text in _numbered_lines(io.BytesIO(content)):
        try:
            later = _parse(path, number, text)["step"] > step
        except UserError as error:  # after a power cut, the lines since the last sync may hold anything
            damage = damage or error
            continue
        if not later:
            if damage is not None:
                raise damage
            kept += text
    if content.startswith(kept):
        os.truncate(path, len(kept))
    else:
        write_atomic(path, bytes(kept))


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
