"""Commands that programs print for a user to type, out of what they print."""

import itertools
import re
import shlex
from typing import NamedTuple

_COMMAND = re.compile(r"(?:\bpython|\btorchrun(?: --[\w=-]+)+) ((?:\w+/)*\w+)\.py\b(.*)")


class Command(NamedTuple):
    """What the shell gives a script: "scripts/plan", ["device=t4"]."""

    script: str
    arguments: list[str]


def commands_in(text):
    """The commands of a text, as a shell reads them. One ends with its line, or before a sentence's period, or at ")".

    Raises:
        AssertionError: one has dots where its user would have to write something: it fails as it is.
    """
    return [_read(match) for match in map(_COMMAND.search, text.splitlines()) if match]


def _read(match):
    script, rest = match.groups()
    assert "..." not in rest, f"not a whole command: {match[0]}"
    if match.string[: match.start()].endswith("$("):
        rest = rest.partition(")")[0]
    words = shlex.shlex(rest, posix=True, punctuation_chars="|>")
    words.whitespace_split = True
    arguments = list(itertools.takewhile(lambda word: word not in ("|", ">"), words))
    if arguments and arguments[-1].endswith("."):
        arguments[-1] = arguments[-1].removesuffix(".")
    return Command(script, arguments)
