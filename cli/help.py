"""--help and --cfg job: what a command does, its groups and its keys, as the YAML files in configs/
explain them."""

import re
from collections.abc import Iterator
from textwrap import fill

from cli.options import groups_of, value_at
from common.config_files import CONFIGS, DEFAULTS, config_file, with_keys
from common.settings import JsonDict


def help_of(config_name: str) -> str:
    """Return the text of --help, which comes from configs/<config_name>.yaml: its first comment,
    groups and keys."""
    comment, _, rest = (
        (CONFIGS / f"{config_name}.yaml").read_text(encoding="utf-8").partition("\n\n")
    )
    header = re.sub("^# ?", "", comment, flags=re.MULTILINE)
    keys = DEFAULTS.sub("", rest).split("\n")
    for file, section in re.findall(r"^  - (\w+)@(\w+)$", rest, re.MULTILINE):
        of_file = (CONFIGS / f"{file}.yaml").read_text(encoding="utf-8").split("\n")[1:]
        keys += [f"{section}:", *(f"  {line}" for line in of_file if line)]
    lists = {
        "Groups (GROUP=NAME) and their keys (GROUP.KEY=VALUE):": list(_groups(config_name)),
        "Keys (KEY=VALUE, SECTION.KEY=VALUE):": list(filter(None, keys)),
    }
    parts = ["\n".join([title, *lines]) for title, lines in lists.items() if lines]
    return "\n\n".join([header, *parts, "All keys, explained: --cfg job. Tracebacks: --debug."])


def _groups(config_name: str) -> Iterator[str]:
    for group, names in groups_of(config_name).items() if config_name != "plan" else ():
        keys = {
            key: None
            for name in names
            for key in config_file(f"{group}/{name}").comments
            if key != "name"
        }
        listed = "" if group == "experiment" or not keys else f"; keys {', '.join(keys)}"
        yield fill(
            f"{group}: {', '.join(names)}{listed}",
            120,
            subsequent_indent="  ",
            break_on_hyphens=False,
        )


def comments_of(composed: JsonDict, config_name: str) -> dict[str, str]:
    """Return the comments of configs/ on the dotted keys of a composed configuration."""
    comments = dict(config_file(config_name).comments)
    for group, names in groups_of(config_name).items():
        chosen = value_at(composed, *group.split("/"), "name")
        for name in sorted(names, key=lambda name: name != chosen):
            for key, comment in config_file(f"{group}/{name}").comments.items():
                if comment:
                    comments.setdefault(f"{group.replace('/', '.')}.{key}", comment)
    return comments


def with_comments(text: str, composed: JsonDict, config_name: str) -> str:
    """Add the comments of configs/ to a composed configuration's YAML."""
    lines, comments = [], comments_of(composed, config_name)
    for line, dotted in with_keys(text):
        meaning = comments.get(dotted)
        lines.append(f"{line:<35} # {meaning}" if meaning else line)
    return "\n".join(lines)
