"""A lock for one owner at a time, which the kernel releases when its holder dies in any way."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common.console import warn
from common.settings import UserError

_PAUSE = 0.1  # seconds between two tries


@contextlib.contextmanager
def owned(path: Path, taken: Callable[[], str | None]) -> Iterator[None]:
    """Hold the lock on `path`: a folder, or an empty file, which is created if missing.

    Args:
        taken: called while another process holds the lock; returns the message of an error, or None to wait on.

    Raises:
        UserError: another process holds it.
    """
    how = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # NFS locks writable files
    handle = os.open(path, how, 0o644)
    try:
        while not _locked(handle, path):
            if (message := taken()) is not None:
                raise UserError(message)
            time.sleep(_PAUSE)
        yield
    finally:
        os.close(handle)  # this releases the lock too


def _locked(handle: int, path: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        warn(f"{path} cannot be locked ({error.strerror}): make sure that no other process writes there")
    return True
