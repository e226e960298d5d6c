"""What configs/ explains: --help, --cfg job, and values that are refused."""

import itertools
import re
from collections.abc import Iterator
from textwrap import fill

from cli.compose import value_at
from common.config_files import CONFIGS, DEFAULTS, config_file, groups_of, keys_of, with_keys
from common.settings import JsonDict, S, UserError, decode


def help_of(config_name: str) -> str:
    """Return the text of --help: the first comment of configs/<config_name>.yaml, groups and
    keys."""
    text = (CONFIGS / f"{config_name}.yaml").read_text(encoding="utf-8")
    comment, _, body = text.partition("\n\n")
    header = re.sub("^# ?", "", comment, flags=re.MULTILINE)
    # Keys are shown as the file has them, with values and comments.
    keys = DEFAULTS.sub("", body).split("\n")
    # A section is a file whose first line explains it.
    for file, section in re.findall(r"^  - (\w+)@(\w+)$", body, re.MULTILINE):
        lines = (CONFIGS / f"{file}.yaml").read_text(encoding="utf-8").split("\n")[1:]
        keys += [f"{section}:", *(f"  {line}" for line in lines if line)]
    groups = [] if config_name == "plan" else list(_groups(config_name))
    lists = {
        "Groups (GROUP=NAME) and their keys (GROUP.KEY=VALUE):": groups,
        "Keys (KEY=VALUE, SECTION.KEY=VALUE):": list(filter(None, keys)),
    }
    paragraphs = ["\n".join([title, *lines]) for title, lines in lists.items() if lines]
    end = "All keys, explained: --cfg job. Tracebacks: --debug."
    return "\n\n".join([header, *paragraphs, end])


def _groups(config_name: str) -> Iterator[str]:
    for group, names in groups_of(config_name).items():
        # Keys of any file of the group, in the order of the files.
        files = [config_file(f"{group}/{name}").comments for name in names]
        keys = [key for key in dict.fromkeys(itertools.chain(*files)) if key != "name"]
        line = f"{group}: {', '.join(names)}"
        if keys and group != "experiment":
            line += f"; keys {', '.join(keys)}"
        yield fill(line, 120, subsequent_indent="  ", break_on_hyphens=False)


def comments_of(composed: JsonDict, config_name: str) -> dict[str, str]:
    """Return the comments of configs/ on the dotted keys of a composed configuration."""
    chosen = {""}
    for group in groups_of(config_name):
        chosen.add(f"{group}={value_at(composed, *group.split('/'), 'name')}")
    explained = {}
    for key, comments in keys_of(config_name).items():
        # The comment of the chosen file comes first, then one of the others.
        by_choice = sorted(comments, key=lambda choice: choice not in chosen)
        explained[key] = next((comments[choice] for choice in by_choice if comments[choice]), "")
    return explained


def decode_explained(cls: type[S], composed: JsonDict, config_name: str) -> S:
    """Decode a composed configuration. Where 0 is refused, say what null does instead."""
    try:
        return decode(cls, composed)
    except UserError as error:
        zero = re.match(r"config ([\w.]+)=0: ", str(error))
        comment = comments_of(composed, config_name).get(zero[1], "") if zero else ""
        of_null = re.search("null: [^;]+", comment)
        if of_null is None:
            raise
        raise UserError(f"{error}; {of_null[0]}") from None


def with_comments(text: str, composed: JsonDict, config_name: str) -> str:
    """Add the comments of configs/ to a composed configuration's YAML."""
    comments = comments_of(composed, config_name)
    lines = []
    for line, key in with_keys(text):
        comment = comments.get(key)
        lines.append(f"{line:<35} # {comment}" if comment else line)
    return "\n".join(lines)
