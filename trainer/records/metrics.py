"""metrics.jsonl: a run's numbers, a line for every step."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import orjson

from common.console import count, warn
from common.files import file_size, sync_directory, write_atomic
from common.settings import JsonDict


class MetricsLog:
    """metrics.jsonl: one JSON object per line, never two lines of one kind for one step.

    Training lines have "loss", evaluation lines "val_loss", and other lines "event".
    """

    def __init__(self, path: Path, resumed_at: int) -> None:
        """Open the log of a run that continues after step `resumed_at`, and drop later lines."""
        self.path = path
        new = file_size(path) is None  # refuses a link to another file
        last = 0 if new else _drop_later(path, resumed_at)
        if last < resumed_at:
            warn(f"{path}: the metrics of steps {last + 1} to {resumed_at} are lost")
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        if new:
            sync_directory(path.parent)

    def write(self, line: JsonDict) -> None:
        """Append a line. It is in the file when this returns.

        Raises:
            OSError: the disk is full. The next start drops what is written of the line.
        """
        content = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            while content:  # a disk that is nearly full takes some bytes, and then fails
                content = content[os.write(self._file, content) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _drop_later(path: Path, step: int) -> int:
    """Cut the file after its last line up to `step`, and remove damaged lines.

    Cutting needs no room on disk. Returns the last step that the file has then.
    """
    content = bytearray()
    end = 0
    last = 0
    for line, text, line_end in _lines(path):
        if line["step"] <= step:
            content += text
            end = line_end
            last = max(last, line["step"])
    os.truncate(path, end)
    if len(content) < end:
        write_atomic(path, bytes(content))
    return last


def read_metrics(path: Path) -> Iterator[JsonDict]:
    """Yield the lines of a metrics.jsonl, one at a time.

    Lines that cannot be read are left out, with a warning; an incomplete last line, left by a
    crash, without.
    """
    return (line for line, _, _ in _lines(path))


def _lines(path: Path) -> Iterator[tuple[JsonDict, bytes, int]]:
    """Yield each line that can be read, as values and as text, and the offset of its end."""
    damaged = 0
    with open(path, "rb") as file:
        for text in file:
            line = _parse(text)
            if line is not None:
                yield line, text, file.tell()
            elif text.endswith(b"\n"):
                damaged += 1
    if damaged:
        warn(f"{path}: left out {count(damaged, 'line')} that cannot be read")


def _parse(text: bytes) -> JsonDict | None:
    """Return a line, or None: a crash left a part of it, or zeros in its place."""
    try:
        line = orjson.loads(text)
    except ValueError:
        return None
    is_whole = text.endswith(b"\n") and isinstance(line, dict)
    return line if is_whole and isinstance(line.get("step"), int) else None
