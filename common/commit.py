"""The commit that a figure, or a run, stands for."""

import subprocess
from pathlib import Path


def git_commit() -> str | None:
    """The commit of this code, with -dirty where files differ from it; None where there is no git."""
    try:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # no git on this machine
        return None
