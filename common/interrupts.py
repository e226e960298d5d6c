"""Ctrl-C during the imports of a command ends it with one line and status 130.

A command must import this module before all others. In other programs it does nothing.
"""

import signal
import sys
from pathlib import Path
from types import FrameType

from common.exits import leave_at_once

_ROOT = Path(__file__).resolve().parents[1]


def _leave(number: int, frame: FrameType | None) -> None:
    leave_at_once(128 + number, "interrupted")


def allow_cleanup() -> None:
    """From now on, Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_main = Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve()
if (
    _main.parent in (_ROOT, _ROOT / "scripts")
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, _leave)
