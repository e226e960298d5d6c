"""How a command ends: what the exit statuses mean. cli/command.py chooses one.

The exit status is 0 (done), 1 (an error that a person must fix), WRONG_OPTIONS, AGAIN, or 128 + n
(killed by signal n).
"""

import contextlib
import os
import sys
from typing import NoReturn

AGAIN = 75
"""The run stopped, and the same command continues it from its last checkpoint (EX_TEMPFAIL)."""
WRONG_OPTIONS = 2
"""A mistake in the options: the command has not begun its work."""

at_once = False
"""True: Python ends without waiting for threads of other packages, which may never end. Set by a
tracker whose library failed."""

lost_process = False
"""True: this process ends because another one is lost."""


def end_process(status: int | str | None) -> NoReturn:
    """End this process like sys.exit."""
    if at_once:
        sys.stdout.flush()
        sys.stderr.flush()
        # As in sys.exit, None is 0 and a text is 1.
        os._exit(status if isinstance(status, int) else int(status is not None))
    sys.exit(status)


def end_process_at_once(status: int, line: str) -> NoReturn:
    """End this process without cleaning up, after one error line.

    This takes no lock, because another thread may hold it.
    """
    with contextlib.suppress(OSError):  # a lost terminal
        os.write(2, f"error: {line}\n".encode())
    os._exit(status)
