"""What the Tab key offers in bash: only what a command takes."""

import glob
import re
from typing import Any

from cli.options import groups_of
from common.settings import flat


def offers(config_name: str, word: str, composed: dict[str, Any]) -> list[str]:
    """Return the words that begin with `word`, which a user has begun to type; keys end at the next dot.

    Args:
        composed: the configuration without this word.
    """
    groups = groups_of(config_name)
    key, equals, value = word.partition("=")
    if not equals:
        keys = [key for key in flat(composed) if key.rpartition(".")[2] != "name"]  # a group's choice sets its name
        words = [f"{key}=" for key in (*groups, *keys)]
        ends = ((len(word) + (each[len(word) :].find(".") + 1 or len(each)), each) for each in words)
        return sorted({each[:end] for end, each in ends if each.startswith(word)})
    found = groups.get(key, [])
    if re.search(r"(checkpoint|dir|file|folder|path)$", key):
        paths = glob.glob(f"{glob.escape(value)}*")
        found = [path for path in paths if re.fullmatch(r"[\w.,=+/@:~-]+", path)]  # others, a shell could run
    return [f"{key}={name}" for name in sorted(found) if name.startswith(value)]
