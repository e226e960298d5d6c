"""Files that are complete or absent: atomic writes, checksums, strict JSON, locks.

Input may come from an untrusted source: only regular files and JSON of bounded size are accepted.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from common.console import warn
from common.settings import UserError

_LARGEST_JSON = 2**28
_PAUSE = 0.1  # seconds between two tries to lock


def open_file(path: Path) -> io.BufferedReader:
    """Open a regular file to read bytes from it; refuse a link, a pipe or a device in its place.

    Raises:
        UserError: it is not a regular file. Its folders may be reached by links.
        OSError: it is missing or cannot be opened.
    """
    file_size(path)  # refuses what is no regular file, before it can block
    return open(path, "rb")


def file_size(path: Path) -> int | None:
    """Return the size of a regular file in bytes, or None if there is no such file.

    Raises:
        UserError: it is not a regular file.
    """
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is a link, a folder, a pipe or a device: put a regular file there")
    return status.st_size


def sha256_file(path: Path) -> str:
    """Return the hex digest of a file's content. Errors are those of `open_file`."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def name_of(settings: Iterable[str]) -> str:
    """Return a file name for "key=value" settings, which needs no quotes on a command line.

    "/" becomes ".". A name with other changes, or a shortened one, ends in a hash of the settings.
    """
    exact = ",".join(settings).replace("/", ".")
    name = re.sub(r"[^\w.,=+-]+", "-", exact, flags=re.ASCII)[:180]
    if name == exact:
        return name
    digest = hashlib.sha256(exact.encode()).hexdigest()
    return f"{name}-{digest[:8]}"


def sync_directory(path: Path) -> None:
    """Make renames and new names inside `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content` atomically: a crash leaves the old file or the new one, whole."""
    data = content.encode() if isinstance(content, str) else content
    temp_path = path.with_name(path.name + ".tmp")
    temp_path.unlink(missing_ok=True)
    try:
        # "x" refuses a planted link of that name, which would lead to another file.
        with open(temp_path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp_path, path)
    except OSError as error:  # an error of write() has no file name
        raise OSError(error.errno, error.strerror, str(path)) from None
    sync_directory(path.parent)


def write_or_warn(path: Path, content: bytes | str) -> bool:
    """Write a file for people, and return whether that worked. A failure is only a warning."""
    try:
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.with_name(path.name + ".tmp").unlink()
        warn(f"{path} was not written: {error.strerror or error}")
        return False
    return True


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON, atomically; refuse NaN and infinity, which JSON lacks."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path, limit: int = _LARGEST_JSON) -> Any:
    """Read a JSON file of at most `limit` bytes, as `parse_json` does.

    Raises:
        UserError: it is missing, unreadable, too large or not such JSON.
    """
    try:
        with open_file(path) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > limit:
        raise UserError(
            f"{path} is larger than {limit:,} bytes: it is damaged, or not the expected file"
        )
    try:
        return parse_json(content)
    except ValueError as error:
        raise UserError(f"cannot read {path}: {error}") from None


def parse_json(content: bytes) -> Any:
    """Parse UTF-8 JSON.

    Raises:
        ValueError: it is not JSON, or has a number that is not finite, or half of a surrogate pair.
    """
    return orjson.loads(content)


def refuse_foreign(mark: bytes, path: Path) -> None:
    """Raise UserError if a command is about to replace a file that it did not write.

    mark: what the first 4,096 bytes of the file contain if the command wrote it.
    """
    is_ours = file_size(path) is not None and mark in path.read_bytes()[:4096]
    if path.exists() and not is_ours:
        raise UserError(
            f"{path} exists and is not from this command, which would replace it: rename it"
        )


def make_directory(path: Path, key: str) -> Path:
    """Create a folder with its parents, and check that it is writable.

    `key` names the setting in errors.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise UserError(f"{key}={path} is not writable: choose another folder")
    return path


@contextlib.contextmanager
def new_directory(path: Path, key: str) -> Iterator[None]:
    """Make a folder and its parents. At the end, remove new folders that are still empty."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    make_directory(path, key)
    try:
        yield
    finally:
        for folder in new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


@contextlib.contextmanager
def hold_lock(path: Path, refusal: Callable[[], str | None]) -> Iterator[None]:
    """Hold the lock on `path`: a folder, or an empty file, which is created if missing.

    The kernel releases the lock when its holder dies in any way.

    Args:
        refusal: called while another process holds the lock; returns the message of an error, or
            None to wait on.

    Raises:
        UserError: another process holds it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # NFS locks writable files
    if path.is_dir():
        flags = os.O_RDONLY
    handle = os.open(path, flags, 0o644)
    try:
        # The kernel's own wait could not call `refusal`.
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                message = refusal()
                if message is not None:
                    raise UserError(message) from None
                time.sleep(_PAUSE)
            except OSError as error:  # a file system without locks
                why = f"{path} cannot be locked ({error.strerror})"
                warn(f"{why}: make sure that no other process writes there")
                break
        yield
    finally:
        os.close(handle)  # this releases the lock too
