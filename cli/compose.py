"""Composes configurations from YAML files and options.

Files are data: what they set for Hydra itself has no effect, and they cannot read the environment.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, get_args

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from cli.mistakes import example_of, explain
from common.command_line import in_hydras_grammar, quote_text
from common.config_files import CONFIGS
from common.settings import JsonDict, Settings, UserError

# A downloaded experiment could put the environment into what a run publishes.
OmegaConf.clear_resolver("oc.env")

_PATHS = ("run_dir", "dataset_dir", "init_from")
"""Settings that are needed before the class of all settings is imported, which knows paths."""


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
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # Hydra checks few files
        raise UserError(f"Hydra cannot compose this configuration: {error}") from error
    plain = _plain(composed, complete, config_name)
    words = number_words(options)
    for key in _PATHS:
        path = words.get(key, plain.get(key))
        if isinstance(path, str):
            plain[key] = os.path.expanduser(path)
    return plain


def _plain(composed: DictConfig, complete: bool, config_name: str) -> JsonDict:
    """Return a composed configuration as plain data. Raises UserError: a value is missing."""
    try:
        plain: JsonDict = OmegaConf.to_container(composed, resolve=True, throw_on_missing=complete)  # type: ignore
    except MissingMandatoryValue as error:
        advice = f"for example, {example_of(config_name)}"
        raise UserError(f"Missing mandatory value: {error.full_key}: {advice}") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {explain(error)}") from None
    return plain


def value_at(tree: Any, *keys: str) -> Any:
    """Return what nested dicts have at these keys; None where they have nothing."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def quote_texts(options: Iterable[str], text_keys: Collection[str]) -> list[str]:
    """Quote the values of text keys, in which Hydra would read quotes, brackets and ${}."""
    quoted = []
    for option in options:
        key, equals, text = option.partition("=")
        is_text = equals and key in text_keys
        quoted.append(f"{key}={in_hydras_grammar(text)}" if is_text else option)
    return quoted


def read_options(options: Iterable[str]) -> list[str]:
    """Return options as Hydra's grammar writes them: keys inside {} bare, and texts quoted."""
    parse = OverridesParser.create().parse_override
    in_grammar = []
    for option in map(_bare_keys, options):
        try:
            parse(option)
            in_grammar.append(option)
        except HydraException:
            in_grammar.append(_quoted(option))
    return in_grammar


def parse_options(options: Iterable[str]) -> list[Override]:
    """Parse options by Hydra's grammar. Raises UserError: Hydra cannot read one."""
    try:
        return OverridesParser.create().parse_overrides(read_options(options))
    except HydraException as error:
        raise UserError(explain(error)) from None


def typed_values(options: list[str]) -> JsonDict:
    """Return the options' values by key; numbers as they were typed.

    An option that deletes a key has the key "~".
    """
    values = {}
    for option in parse_options(options):
        key = "~" if option.is_delete() else option.key_or_group
        values[key] = option.value()
    return values | number_words(options)


def number_words(options: Iterable[str]) -> dict[str, str]:
    """Return by key what was typed where Hydra reads a number, true or false: 007, 1e3."""
    return {
        option.key_or_group: str(option.input_line).partition("=")[2]
        for option in parse_options(options)
        if isinstance(option.value(), int | float)
    }


def with_typed_texts(
    config: JsonDict, options: Iterable[str], settings_class: Callable[[], type[Settings]]
) -> JsonDict:
    """Return the configuration with what was typed for texts and paths that look like numbers.

    The class of the settings says which they are. It is imported where there is a number.
    """
    for key, word in number_words(options).items():
        keys = key.split(".")
        types = _types_at(settings_class(), keys)
        if types & {str, Path} and not types & {int, float, bool}:
            config = _with_value(config, keys, word)
    return config


def _types_at(cls: type[Settings], keys: list[str]) -> set[Any]:
    """Return the types that a key of a class, or of its sections, may have."""
    types: set[Any] = {cls}
    for key in keys:
        sections = [kind for kind in types if isinstance(kind, type) and issubclass(kind, Settings)]
        fields = [section.model_fields.get(key) for section in sections]
        types = set().union(*(_types_in(field.annotation) for field in fields if field))
    return types


def _types_in(annotation: Any) -> set[Any]:
    """Return the types of which a union, a list or an annotated type is made."""
    inner = get_args(annotation)
    return set().union(*map(_types_in, inner)) if inner else {annotation}


def _with_value(tree: JsonDict, keys: list[str], value: Any) -> JsonDict:
    first, *rest = keys
    return tree | {first: _with_value(tree[first], rest, value) if rest else value}


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
    return f"{key}={quote_text(value)}"
