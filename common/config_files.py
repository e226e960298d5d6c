"""The files of configs/: the default values of all settings, and the comments that explain them.

Settings classes and the command line share what is read here; each file is read once.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
DEFAULTS = re.compile(r"^defaults:\n( .*\n)*", re.MULTILINE)
"""Hydra's list of the files that a file is based on."""


class ConfigFile(NamedTuple):
    """A file of configs/ with the files that it is based on."""

    values: dict[str, Any]
    """By key, without those that a user must give. A group has the values of its chosen file."""
    comments: dict[str, str]
    """By dotted key; "" for a key without a comment."""


@functools.cache
def config_file(name: str) -> ConfigFile:
    """Read configs/NAME.yaml. Comments of files in groups are left out."""
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text) or {}
    values: dict[str, Any] = {}
    comments: dict[str, str] = {}
    # The files that it is based on come first. Its own keys replace theirs.
    for base in content.pop("defaults", []):
        if isinstance(base, dict):  # a group and the chosen file
            ((group, choice),) = base.items()
            group = group.removeprefix("override ")
            if choice is not None:
                values[group] = config_file(f"{_resolve_base(name, group)}/{choice}").values
            continue
        if base == "_self_":
            continue
        # FILE@SECTION puts another file's keys into a section; a file alone has the same sections.
        file, _, section = base.partition("@")
        included = config_file(_resolve_base(name, file))
        if section in ("", "_here_"):
            values |= included.values
            comments |= included.comments
        else:
            values[section] = included.values
            comments |= {f"{section}.{key}": line for key, line in included.comments.items()}
    values |= {key: value for key, value in content.items() if value != "???"}
    for line, key in with_keys(DEFAULTS.sub("", text)):
        comment = line.partition(" # ")[2]
        # A key without a comment keeps the comment of the file that this one is based on.
        if key and (comment or key not in comments):
            comments[key] = comment
    # The first line of a group's file says what its name stands for.
    if "name" in comments:
        comments["name"] = text.removeprefix("# ").partition("\n")[0]
    return ConfigFile(values, comments)


def _resolve_base(name: str, other: str) -> str:
    """Return the path of what a file's defaults list names: absolute, or in the file's folder."""
    folder, slash, _ = name.rpartition("/")
    return other.removeprefix("/") if "/" in other else f"{folder}{slash}{other}"


def groups_of(config_name: str) -> dict[str, list[str]]:
    """Return the names in every group of a command: {"schedule": ["constant", "cosine", ...]}."""
    groups: dict[str, list[str]] = {}
    for path in sorted(CONFIGS.glob("*/**/*.yaml")):
        group = str(path.parent.relative_to(CONFIGS))
        commands = ("prepare",) if group in ("data", "tokenizer") else ("train", "plan")
        if config_name in commands:
            groups.setdefault(group, []).append(path.stem)
    return groups


def keys_of(config_name: str) -> dict[str, dict[str, str]]:
    """Return a command's dotted keys, each with its comments.

    The comments are by GROUP=NAME, for the files that have the key, or by "", for the command's own
    file.
    """
    keys = {key: {"": comment} for key, comment in config_file(config_name).comments.items()}
    for group, names in groups_of(config_name).items():
        for name in names if group != "experiment" else []:
            for key, comment in config_file(f"{group}/{name}").comments.items():
                comments = keys.setdefault(f"{group.replace('/', '.')}.{key}", {})
                comments[f"{group}={name}"] = comment
    return keys


def group_values(group: str, name: str) -> dict[str, Any]:
    """Return the values of a file in a group of configs/; {} if there is no such file."""
    is_file = name.isidentifier() and (CONFIGS / group / f"{name}.yaml").exists()
    return config_file(f"{group}/{name}").values if is_file else {}


def with_keys(text: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a YAML file, each with the dotted key that it starts, or ""."""
    above: list[str] = []
    for line in text.split("\n"):
        match = re.match(r"((?:  )*)(\w+):", line)
        if match is None:
            yield line, ""
            continue
        depth = len(match[1]) // 2
        above = [*above[:depth], match[2]]
        yield line, ".".join(above)
