"""Composes configurations from YAML files and options.

Files are data: what they set for Hydra itself has no effect, and they cannot read the environment.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from cli.mistakes import example_of, explain
from common.command_line import in_hydras_grammar
from common.config_files import CONFIGS
from common.settings import JsonDict, UserError

# A downloaded experiment could put the environment into what a run publishes.
OmegaConf.clear_resolver("oc.env")

_TEXTS = re.compile(
    r"\w+_(dir|field|files?|from|in|name|out|path)|"
    "checkpoint|csv|device|folder|host|nanogpt|out|path|project|prompt|revision|split|stop|subset|text"
)
"""The last words of keys whose values are texts, even if they look like numbers."""


def compose(
    config_name: str, overrides: list[str], config_dir: str | None = None, complete: bool = True
) -> JsonDict:
    """Compose configs/<config_name>.yaml with these options.

    Args:
        config_dir: a folder with further members of groups.
        complete: whether required values must be given; else "???" stands for them.

    Raises:
        UserError: an option or a file does not exist, a file is not a configuration, or a required
            value is missing.
    """
    options = read_options(overrides)
    if config_dir:
        folder = Path(os.path.expanduser(config_dir)).resolve()
        if not folder.is_dir():
            raise UserError(f"--config-dir {config_dir} is not a folder")
        options.append(f"hydra.searchpath=[{in_hydras_grammar(f'file://{folder}')}]")
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra.compose(config_name, options)
    except (HydraException, OmegaConfBaseException, OSError, yaml.YAMLError) as error:
        raise UserError(explain(error, config_name)) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # Hydra does not check all values, nor what a file sets under `hydra`.
        raise UserError(f"Hydra cannot compose this configuration: {error}") from error
    return _plain(composed, complete, config_name)


def _plain(composed: DictConfig, complete: bool, config_name: str) -> JsonDict:
    """Return a composed configuration as plain data. Raises UserError: a value is missing."""
    try:
        plain: JsonDict = OmegaConf.to_container(composed, resolve=True, throw_on_missing=complete)  # type: ignore
    except MissingMandatoryValue as error:
        advice = f"for example, {example_of(config_name)}"
        raise UserError(f"Missing mandatory value: {error.full_key}: {advice}") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {explain(error)}") from None
    for key, value in plain.items():
        if is_text(key) and isinstance(value, str | int | float):
            plain[key] = os.path.expanduser(str(value))
    return plain


def value_at(tree: Any, *keys: str) -> Any:
    """Return what nested dicts have at these keys; None where they have nothing."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def is_text(option: str) -> bool:
    """Return whether the value of KEY=VALUE is a text."""
    key = option.partition("=")[0]
    return _TEXTS.fullmatch(key.rpartition(".")[2]) is not None


def read_options(options: list[str]) -> list[str]:
    """Return options as Hydra's grammar writes them: keys inside {} bare, and texts quoted."""
    parse = OverridesParser.create().parse_override
    in_grammar = []
    for option in map(_bare_keys, options):
        try:
            is_number = isinstance(parse(option).value(), int | float)
            needs_quotes = is_number and is_text(option)
        except HydraException:
            needs_quotes = True
        in_grammar.append(_quoted(option) if needs_quotes else option)
    return in_grammar


def keys_and_values(options: list[str]) -> JsonDict:
    """Return the options' values by key, as Hydra's grammar reads them.

    An option that deletes a key has the key "~".

    Raises:
        UserError: Hydra cannot read an option.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(read_options(options))
    except HydraException as error:
        raise UserError(explain(error)) from None
    values = {}
    for option in parsed:
        key = "~" if option.is_delete() else option.key_or_group
        values[key] = option.value()
    return values


def _bare_keys(option: str) -> str:
    """Turn KEY={"Pile-CC": 2}, as in JSON, into KEY={Pile-CC: 2}, as in Hydra's grammar."""
    key, _, value = option.partition("=")
    try:
        mapping = json.loads(value) if value.startswith("{") else None
    except ValueError:
        return option
    if not mapping:
        return option
    members = []
    for name, item in mapping.items():
        bare = re.sub(r"([\\()\[\]{}:=, ])", r"\\\1", name)
        members.append(f"{bare}: {json.dumps(item)}")
    return f"{key}={{{', '.join(members)}}}"


def _quoted(option: str) -> str:
    """Quote a value that Hydra's grammar does not read as a text, such as the path a/seed=1."""
    key, equals, value = option.partition("=")
    is_key = re.fullmatch(r"[+~]{0,2}[\w./@-]+", key)
    has_structure = re.match("['\"[{(]", value)
    if not equals or not is_key or has_structure:
        return option  # Hydra says what is wrong
    return f"{key}={in_hydras_grammar(value)}"
