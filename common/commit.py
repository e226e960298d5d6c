"""The code that produced a figure or a run."""

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def code_digest(packages: Iterable[str] = ("common", "data", "model", "runtime", "trainer")) -> str:
    """Return a digest of the code of packages, by default of all that train. It needs no git."""
    digest = hashlib.sha256()
    for package in sorted(packages):
        for path in sorted((_ROOT / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def git_commit(root: Path = _ROOT) -> str | None:
    """Return the commit of the code in `root`, with -dirty if files differ from it.

    It is None without git, and if `root` is only a folder in another repository, such as an
    unpacked archive.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or not root.samefile(top):
        return None
    return _git(root, "describe", "--always", "--dirty")


def _git(root: Path, *arguments: str) -> str | None:
    """Return what git prints about a folder, or None if it fails."""
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True
        )
    except OSError:  # no git on this machine
        return None
    return result.stdout.strip() or None
