"""Composing a configuration, and saying in one line what is wrong with it."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from common.settings import UserError, nearest

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def to_dict(composed: DictConfig) -> dict[str, Any]:
    """A composed configuration as plain data.

    Raises:
        UserError: a value that must be given is missing.
    """
    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except MissingMandatoryValue as error:
        key = error.full_key
        raise UserError(f"{key} is not given: add {key}=... to the command (--help shows every key)") from None


def explain(error: BaseException, config_name: str) -> str:
    """One line for what Hydra refused, with the nearest valid name."""
    for cause in _chain(error):
        if isinstance(cause, UserError):
            break
        if isinstance(cause, MissingConfigException) and cause.options:
            group, _, name = (cause.missing_cfg_file or "").rpartition("/")
            more = "; pip install -e '.[sweep]' brings others" if group.startswith("hydra/") else ""
            return f"{group}={name} does not exist: {nearest(name, cause.options)}{more}"
        if isinstance(cause, OverrideParseException):
            return f"cannot read the option {cause.override}: give KEY=VALUE, a text as 'KEY=\"...\"'"
        if isinstance(cause, UnsupportedInterpolationType):
            what = str(cause.msg).splitlines()[0].rpartition(" ")[2]
            return f"{cause.full_key}: ${{{what}:...}} is not available: write the value itself, in a shell as $NAME"
        if isinstance(cause, ConfigKeyError | ConfigAttributeError):
            key, keys = str(cause.full_key), _valid_keys(config_name)
            if key.startswith("hydra.") and isinstance(cause.parent_node, DictConfig):
                keys = [f"{key.rpartition('.')[0]}.{name}" for name in map(str, cause.parent_node)]
            if key not in keys:
                return f"unknown config key '{key}': {nearest(key, keys)}"
    return " ".join(str(error).split())


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _valid_keys(config_name: str) -> list[str]:
    """Every key of the configuration, with the groups' members that the command line asks for where they exist."""
    choices = [arg for arg in sys.argv[1:] if (CONFIGS / (arg.replace("=", "/", 1) + ".yaml")).is_file()]
    for wanted in (choices, []):  # what the command line asks for may be what is wrong
        with contextlib.suppress(UserError, HydraException, OmegaConfBaseException, OSError):
            return list(_keys(_compose(config_name, wanted)))
    return []


def compose(config_name: str, overrides: list[str]) -> DictConfig:
    """The configuration that a command with these options would get.

    Raises:
        UserError: there is no such option or file.
    """
    try:
        return _compose(config_name, overrides)
    except (HydraException, OmegaConfBaseException, OSError) as error:
        raise UserError(explain(error, config_name)) from error


def _compose(config_name: str, overrides: list[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra.compose(config_name, overrides=overrides)


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, node):
        yield f"{prefix}{key}"
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            yield from _keys(node[key], f"{prefix}{key}.")
