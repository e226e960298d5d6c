"""The code that produced a figure or a run."""

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def code_digest(packages: Iterable[str] = ("common", "data", "model", "trainer")) -> str:
    """Return a digest of the code of packages, by default of all that trains; it needs no git."""
    files = (path for package in packages for path in (_ROOT / package).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:12]


def git_commit() -> str | None:
    """Return the commit of this code, with -dirty if files differ from it, or None without git."""
    try:
        git = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # no git on this machine
        return None
