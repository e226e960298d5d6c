"""A lock for one owner at a time, which the kernel releases when its holder dies in any way."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from common.console import warn
from common.settings import UserError


@contextlib.contextmanager
def owned(path: Path, taken: Callable[[], str] | None) -> Iterator[None]:
    """Hold the lock on `path`: a folder, or an empty file, which is created if missing.

    Args:
        taken: returns the message of the error if another process holds the lock; None waits for it.

    Raises:
        UserError: another process holds it, and `taken` is given.
    """
    how = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # NFS locks writable files
    handle = os.open(path, how, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if taken is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        assert taken is not None
        raise UserError(taken()) from None
    except OSError as error:  # a file system without locks
        warn(f"{path} cannot be locked ({error.strerror}): make sure that no other process writes there")
    try:
        yield
    finally:
        os.close(handle)  # this releases the lock too
