"""The answer to a mistyped option: Hydra's error in one line, with the nearest key or name."""

import re

from common.config_files import config_file, groups_of
from common.settings import nearest

_ASIDES = ("To append", "See https", "full_key", "object_type", "reference_type")
"""Lines of Hydra's messages that begin like this do not say what is wrong."""


def explain(error: Exception, config_name: str = "") -> str:
    """Return Hydra's message as one line, with the nearest key or name if one is not known."""
    first = str(error).split("\n\n")[0]
    lines = [line.strip(" ^") for line in first.splitlines()]
    message = " ".join(line for line in lines if line and not line.startswith(_ASIDES))
    unknown = re.search(r"Could not (?:override|find|load) '([\w./-]+)'", message)
    if unknown is None or not config_name:
        return message
    key = unknown[1]
    known = _known(config_name)
    if known.get(key):
        return f"{message.rstrip('.')}: it is a key of {' or '.join(known[key])}"
    advice = nearest(key, known)
    if not advice.startswith("did you mean"):
        return message
    return f"{message.rstrip('.')}: {advice}"


def _known(config_name: str) -> dict[str, list[str]]:
    """Return a command's keys, its groups and their names as GROUP/NAME.

    The key of a group comes with the choices GROUP=NAME that have it.
    """
    known: dict[str, list[str]] = {key: [] for key in config_file(config_name).comments}
    for group, names in groups_of(config_name).items():
        known[group] = []
        for name in names:
            known[f"{group}/{name}"] = []
            if group == "experiment":
                continue
            for key in config_file(f"{group}/{name}").comments:
                choices = known.setdefault(f"{group.replace('/', '.')}.{key}", [])
                choices.append(f"{group}={name}")
    return known
