"""The commit that produced a figure or a run."""

import subprocess
from pathlib import Path


def git_commit() -> str | None:
    """Return the commit of this code, with -dirty if files differ from it, or None without git."""
    try:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # no git on this machine
        return None
