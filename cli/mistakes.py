"""The answer to a mistyped option: one line that says what to type here."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from common.config_files import CONFIGS, config_file, groups_of, keys_of
from common.settings import UserError, suggest_name

_ASIDES = ("To append", "See https", "full_key", "object_type", "reference_type")
"""Lines of Hydra's messages that begin like this do not say what is wrong."""
_ELSEWHERE = {
    "batch_size": "batch_tokens is a step's size in tokens, runtime.micro_batch sequences at once",
    "block_size": "type seq_len",
    "learning_rate": "type optim.max_lr",
    "max_iters": "type max_steps",
    "out_dir": "type run_dir",
}
"""Keys of other frameworks, and what to type here when training."""


def explain_error(error: Exception, config_name: str = "") -> str:
    """Return Hydra's message as one line, with what to type if a key or a name is not known."""
    first = str(error).split("\n\n")[0]
    lines = [line.strip(" ^") for line in first.splitlines()]
    message = " ".join(line for line in lines if line and not line.startswith(_ASIDES))
    unknown = re.search(r"Could not (?:override|find|load) '([\w./-]+)'", message)
    if unknown is None or not config_name:
        return message
    return f"{message.rstrip('.')}: {_advice(unknown[1], config_name)}"


def _advice(wrong: str, config_name: str) -> str:
    """Say what to type in place of a key, or of GROUP/NAME, that does not exist."""
    groups = groups_of(config_name)
    group, _, name = wrong.rpartition("/")
    if group in groups:
        return suggest_name(name, groups[group], f"{group}=")
    if groups and wrong in _ELSEWHERE:
        return _ELSEWHERE[wrong]
    known = keys_of(config_name)
    choices = [choice for choice in known.get(wrong, ()) if choice]
    if choices:
        return f"it is a key of {' or '.join(choices)}"
    # A group is typed with /, such as model/attention.
    typed = [key for key in known if key.replace(".", "/") not in groups] + list(groups)
    # Keys of the same section that are alike, then keys of other sections that end alike.
    above, _, last = wrong.rpartition(".")
    section = above if any(key.startswith(f"{above}.") for key in typed) else ""
    prefix = f"{section}." if section else ""
    keys = [key.removeprefix(prefix) for key in typed if key.startswith(prefix)]
    advice = suggest_name(last, [key for key in keys if not re.search("[./]", key)], prefix)
    alike = [key for key in typed if re.search(rf"[._/]{re.escape(last)}$", key)]
    if alike and not advice.startswith("did you mean"):
        return f"did you mean {' or '.join(map(repr, alike[:4]))}?"
    return advice


def explain_dashes(words: Sequence[str], wrong: str) -> str:
    """Say what to type in place of --KEY=VALUE or --KEY VALUE."""
    key, _, value = wrong.lstrip("-").partition("=")
    following = words[words.index(wrong) + 1 :]
    if not value:
        value = following[0] if following and "=" not in following[0] else "..."
    typed = shlex.quote(f"{key.replace('-', '_')}={value}")
    return f"unrecognized arguments: {wrong}: options have no dashes: type {typed}"


def check_form(options: Sequence[str], config_name: str) -> None:
    """Raise UserError for a word that is not KEY=VALUE, and for a group with dots."""
    groups = groups_of(config_name)
    for option in options:
        key, equals, value = option.partition("=")
        if not equals and not option.startswith("~"):
            raise UserError(_advice_on_word(option, config_name))
        group = key.replace(".", "/")
        if "." in key and group in groups and not value.startswith("{"):
            raise UserError(f"{key} is a group: type {group}={value}")


def _advice_on_word(word: str, config_name: str) -> str:
    """Say what to type in place of a word that is not KEY=VALUE."""
    experiments = groups_of(config_name).get("experiment", [])
    advice = f"for example, {example_of(config_name)}"
    if word in experiments:
        advice = f"type experiment={word}"
    elif experiments and Path(word).is_dir():
        advice = f"type run_dir={shlex.quote(word)}"
    elif experiments:
        advice = f"type experiment=NAME, with one of {', '.join(experiments)}"
    elif "checkpoint" in config_file(config_name).comments:
        advice = f"type checkpoint={shlex.quote(word)}"
    return f"{word} is not KEY=VALUE: {advice}"


def example_of(config_name: str) -> str:
    """Return the first command of a command's --help."""
    text = (CONFIGS / f"{config_name}.yaml").read_text(encoding="utf-8")
    return text.partition("\n#   ")[2].partition("\n")[0].partition("  ")[0]
