"""Composes configurations from YAML files and options, and explains in one line what is wrong with them.

Files are data: they can neither configure Hydra itself nor read the environment.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, errors

from common.settings import CONFIGS, UserError, nearest

OmegaConf.clear_resolver("oc.env")  # a downloaded experiment could send the environment elsewhere; shells have $HOME


def compose(config_name: str, overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """Compose configs/<config_name>.yaml with these options. `config_dir`: a folder with further members of groups.

    Raises:
        UserError: an option or a file does not exist, or a file sets an option of Hydra itself.
    """
    folder = [f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"] if config_dir else []
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra.compose(config_name, [*overrides, *folder], return_hydra_config=True)
            expected = _untouched_settings(*folder)
    except (HydraException, errors.OmegaConfBaseException, OSError) as error:
        raise UserError(explain(error)) from error
    given = _hydra_settings(composed)
    for key in {**expected, **given}:
        if given.get(key) != expected.get(key):
            raise UserError(f"hydra.{key} is set by a configuration file, which is not allowed: remove it")
    return OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])


@functools.cache
def _untouched_settings(*folder: str) -> dict[str, Any]:
    """Return the settings of Hydra itself where no file and no option sets any; a sweep asks for every job."""
    return _hydra_settings(hydra.compose(overrides=list(folder), return_hydra_config=True))


def _hydra_settings(composed: DictConfig) -> dict[str, Any]:
    """Return the settings of Hydra itself, without those that differ between any two compositions."""
    settings: Any = OmegaConf.to_container(composed.hydra, enum_to_str=True)
    del settings["runtime"], settings["overrides"], settings["job"]["override_dirname"], settings["job"]["config_name"]
    return dict(settings)


def to_dict(composed: DictConfig, complete: bool = True) -> dict[str, Any]:
    """Return a composed configuration as plain data. If it need not be complete, "???" stands for required values.

    Raises:
        UserError: a required value is missing, or a value refers to something that does not exist.
    """
    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=complete)  # type: ignore[return-value]
    except errors.MissingMandatoryValue as error:
        key = error.full_key
        raise UserError(f"config key '{key}' is missing: give it a value, as in {key}=...") from None
    except errors.OmegaConfBaseException as error:
        raise UserError(explain(error)) from None


def explain(error: BaseException) -> str:
    """Return one line that explains Hydra's error, with the nearest valid name."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MissingConfigException) and cause.options:
            group, _, name = (cause.missing_cfg_file or "").rpartition("/")
            more = "; pip install -e '.[sweep]' adds others" if group.startswith("hydra/") else ""
            return f"{group}={name} does not exist: {nearest(name, cause.options)}{more}"
        if isinstance(cause, OverrideParseException):
            return f"cannot read the option {cause.override}: write KEY=VALUE, and a text as 'KEY=\"...\"'"
        if isinstance(cause, errors.UnsupportedInterpolationType):
            resolver = str(cause.msg).splitlines()[0].rpartition(" ")[2]
            return f"{cause.full_key}: ${{{resolver}:...}} is not available: write the value, in a shell as $NAME"
        if isinstance(cause, errors.ConfigKeyError | errors.ConfigAttributeError) and cause.parent_node is not None:
            key, every = str(cause.full_key), _keys(OmegaConf.to_container(cause.parent_node._get_root()))
            keys = [other for other in every if (other.split(".")[0] == "hydra") == key.startswith("hydra.")]
            if key not in keys:
                return f"unknown config key '{key}': {nearest(key, keys)}"
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())


def _keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key, including the keys of sections."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")
