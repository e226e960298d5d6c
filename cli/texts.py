"""Texts among the options, taken as they are: Hydra would read quotes, brackets and ${} in them."""

from collections.abc import Collection, Sequence
from typing import Any

from common.settings import JsonDict


def texts_in(words: Sequence[str], text_keys: Collection[str]) -> dict[str, str]:
    """Return the values of options KEY=TEXT with these keys."""
    texts = {}
    for word in words:
        key, equals, text = word.partition("=")
        if equals and key in text_keys:
            texts[key] = text
    return texts


def without_texts(options: Sequence[str], texts: Collection[str]) -> list[str]:
    """Return the options, with null in place of texts."""
    keys = [option.partition("=")[0] for option in options]
    return [
        f"{key}=null" if key in texts else option for key, option in zip(keys, options, strict=True)
    ]


def with_texts(config: JsonDict, texts: dict[str, Any]) -> JsonDict:
    """Return the configuration with texts by key, which may be SECTION.KEY."""
    for key, text in texts.items():
        section, _, last = key.rpartition(".")
        values = {last: text}
        if section:
            values = {section: config[section] | values}
        config = config | values
    return config
