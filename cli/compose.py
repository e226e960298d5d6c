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
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from cli.mistakes import example_of, explain_error
from common.command_line import format_value, quote_text
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
    # Hydra reads the files of configs/, and those of the user's folder.
    options = [str(option.input_line) for option in parse_options(overrides)]
    if config_dir:
        folder = Path(os.path.expanduser(config_dir)).resolve()
        if not folder.is_dir():
            raise UserError(f"--config-dir {config_dir} is not a folder")
        options.append(f"hydra.searchpath=[{format_value(f'file://{folder}')}]")
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra.compose(config_name, options)
    except (HydraException, OmegaConfBaseException, OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(explain_error(error, config_name)) from error
    # Resolve references, and turn the configuration into plain data.
    try:
        plain: JsonDict = OmegaConf.to_container(composed, resolve=True, throw_on_missing=complete)  # type: ignore
    except MissingMandatoryValue as error:
        advice = f"for example, {example_of(config_name)}"
        raise UserError(f"Missing mandatory value: {error.full_key}: {advice}") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {explain_error(error)}") from None
    for key in _PATHS:
        if isinstance(plain.get(key), str):
            plain[key] = os.path.expanduser(plain[key])
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
        quoted.append(f"{key}={format_value(text)}" if is_text else option)
    return quoted


def parse_options(options: Iterable[str]) -> list[Override]:
    """Parse options by Hydra's grammar: keys inside {} become bare, and texts quoted.

    Raises:
        UserError: Hydra cannot read an option.
    """
    parse = OverridesParser.create().parse_override
    parsed = []
    for option in map(_bare_keys, options):
        try:
            parsed.append(parse(option))
        except HydraException:
            try:
                parsed.append(parse(_quoted(option)))
            except HydraException as error:
                raise UserError(explain_error(error)) from None
    return parsed


def quote_numbers(
    options: Iterable[str], settings_class: Callable[[], type[Settings]]
) -> list[str]:
    """Quote numbers, true and false where the settings have a text or a path: run_dir=1e3.

    The class of the settings is imported if there is a number.
    """
    quoted = []
    for option in parse_options(options):
        key, _, value = str(option.input_line).partition("=")
        is_number = isinstance(option.value(), int | float)
        is_text = is_number and _is_text(settings_class(), str(option.key_or_group))
        quoted.append(f"{key}={quote_text(value)}" if is_text else str(option.input_line))
    return quoted


def _is_text(cls: type[Settings], key: str) -> bool:
    """Return whether a dotted key of a class, or of its sections, holds a text or a path."""
    types: set[Any] = {cls}
    for name in key.split("."):
        fields = [getattr(kind, "model_fields", {}).get(name) for kind in types]
        types = set().union(*(_types_in(field.annotation) for field in fields if field))
    return bool(types & {str, Path}) and not types & {int, float, bool}


def _types_in(annotation: Any) -> set[Any]:
    """Return the types of which a union, a list or an annotated type is made."""
    inner = get_args(annotation)
    return set().union(*map(_types_in, inner)) if inner else {annotation}


def _bare_keys(option: str) -> str:
    """Turn KEY={"Pile-CC": 2}, as in JSON, into KEY={Pile-CC: 2}, as in Hydra's grammar."""
    key, _, value = option.partition("=")
    try:
        mapping = json.loads(value) if value.startswith("{") else None
    except ValueError:
        return option
    return f"{key}={format_value(mapping)}" if mapping else option


def _quoted(option: str) -> str:
    """Quote a value that Hydra's grammar does not read as a text, such as the path a/seed=1."""
    key, equals, value = option.partition("=")
    is_key = re.fullmatch(r"[+~]{0,2}[\w./@-]+", key)
    has_structure = re.match("['\"[{(]", value)
    if not equals or not is_key or has_structure:
        return option  # Hydra says what is wrong
    return f"{key}={quote_text(value)}"
