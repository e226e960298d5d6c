"""Options as words of a command line: KEY=VALUE in Hydra's grammar, read and written."""

import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator

T = TypeVar("T")


def _split_items(value: Any) -> Any:
    """Split "a,b" or "[a,b]" into its items.

    Brackets protect the commas of an item: "[a,b],[c]" is "a,b" and "c". A path that exists is one
    item, because the folders of a sweep's jobs have commas in their names.
    """
    if not isinstance(value, str):
        return value
    if "=" in value and os.path.exists(value):
        return [value]
    bracketed = re.fullmatch(r"\[((?:[^][]|\[[^][]*\])*)\]", value)
    text = bracketed[1] if bracketed else value
    if not text:
        return []
    items = re.split(r",(?![^][]*\])", text)
    return [re.sub(r"^\[(.*)\]$", r"\1", item.strip()) for item in items]


Items = Annotated[list[T], BeforeValidator(_split_items)]
"""The type of an option that takes several values: KEY=a,b or KEY=[a,b]."""


# Hydra's grammar reads these as other values than texts.
_NO_TEXTS = ("null", "true", "false", "nan", "inf")
_PLAIN = re.compile(r"[\w./-]+( [\w./-]+)+|(?=.*=)[\w.,/=+-]+( [\w.,/=+-]+)*", re.ASCII)
"""Texts that our command lines read as they are: words, and names of a sweep's jobs, such as
runs/sweep/a=1,b=2."""


def format_options(settings: Mapping[str, Any]) -> str:
    """Return settings as arguments of our command lines, quoted for a shell."""
    options = []
    for key, value in settings.items():
        is_plain = _PLAIN.fullmatch(str(value))
        text = value if is_plain else format_value(value)
        options.append(shlex.quote(f"{key}={text}"))
    return " ".join(options)


def format_value(value: Any) -> str:
    """Return a value as Hydra's grammar writes it.

    A text that the grammar would read as something else is quoted.
    """
    if isinstance(value, Mapping):
        members = []
        for key, item in value.items():
            bare_key = re.sub(r"([\\()\[\]{}:=, ])", r"\\\1", key)
            members.append(f"{bare_key}:{format_value(item)}")
        return f"{{{','.join(members)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str):
        return json.dumps(value)
    # Two of a-z, _ and / in a row, or a letter at the start: no number, such as 1e5.
    is_word = re.fullmatch(r"[\w./-]*[a-z_/]{2}[\w./-]*|[a-zA-Z][\w./-]*", value, re.ASCII)
    if is_word and value.lower() not in _NO_TEXTS:
        return value
    # OmegaConf would resolve ${}. It reads \${ as ${, and two backslashes before that as one.
    return quote_text(re.sub(r"(\\*)\$\{", r"\1\1\\${", value))


def quote_text(text: str) -> str:
    """Return a text in quotes, as Hydra's grammar reads it. ${} is still a reference."""
    # Backslashes before a quote, or at the end, would escape that.
    return '"' + re.sub(r'(\\+)(?="|\Z)', r"\1\1", text).replace('"', r"\"") + '"'


def format_changes(changed: dict[str, tuple[Any, Any]], before: str) -> list[str]:
    """Return changed settings, old and new by key, as they are typed: "seed=2 (BEFORE 1)"."""
    return [
        f"{key}={format_value(new)} ({before} {format_value(old)})"
        for key, (old, new) in changed.items()
    ]
