"""How a command ends.

Exit statuses of train.py besides 0 (done), 1 (an error that a person must fix) and 128 + n (killed
by signal n).
"""

import contextlib
import os
import sys
from typing import NoReturn

AGAIN = 75
"""Stopped; only the steps since the last checkpoint are lost. Run the same command again
(EX_TEMPFAIL)."""
WRONG_OPTIONS = 2
"""A mistake in the options: the command has not begun its work."""

at_once = False
"""Whether Python must not wait at its end for what other packages have started, because that may
never end."""


def leave(status: int | str | None) -> NoReturn:
    """End this process like sys.exit."""
    if at_once:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))
    sys.exit(status)


def leave_at_once(status: int, line: str) -> NoReturn:
    """End this process without cleaning up, after one error line. Takes no lock that another thread
    may hold."""
    with contextlib.suppress(OSError):  # a lost terminal
        os.write(2, f"error: {line}\n".encode())
    os._exit(status)
