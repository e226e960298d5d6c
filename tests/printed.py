"""What programs print and leave: commands for a user to type, errors, and files."""

import re
import shlex
from typing import NamedTuple

_COMMAND = re.compile(r"([`(]?)(?:\bpython|\btorchrun(?: --[\w=-]+)+) ((?:\w+/)*\w+)\.py\b([^`\n]*)")


class Command(NamedTuple):
    """What the shell gives a script: "scripts/plan", ["device=t4"]."""

    script: str
    arguments: list[str]


def commands_in(text):
    """The commands of a text, as a shell reads them. One ends with its line, a sentence's period, or what surrounds it.

    Raises:
        AssertionError: one has dots where its user would have to write something: it fails as it is.
    """
    return [_read(match) for match in _COMMAND.finditer(text.replace("\\\n", ""))]


def _read(match):
    before, script, rest = match.groups()
    rest = rest.partition({"`": "`", "(": ")"}.get(before, "\n"))[0]
    assert "..." not in rest, f"not a whole command: {match[0]}"
    arguments = shlex.split(re.split(r" (?:\||\d?>)", rest)[0], comments=True)
    if arguments and arguments[-1].endswith("."):
        arguments[-1] = arguments[-1].removesuffix(".")
    return Command(script, arguments)


def assert_one_line(result, *fragments):
    """Check what a mistake gives: a nonzero status, and one short line that starts with error and has all fragments."""
    assert result.status not in (0, None)
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert len(result.err) < 600
    for fragment in fragments:
        assert fragment in result.err


def snapshot(folder):
    """Every file with its content and the time of its last change, but the log of what was printed."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "console.log"]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
