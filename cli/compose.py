"""Composes configurations from YAML files and options.

Files are data: what they set for Hydra itself has no effect, and they cannot read the environment.
"""

import os
from pathlib import Path

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from cli.options import explain, is_text, read_options
from common.command_line import in_hydras_grammar
from common.config_files import CONFIGS
from common.settings import JsonDict, UserError

# A downloaded experiment could put the environment into what a run publishes.
OmegaConf.clear_resolver("oc.env")


def compose(config_name: str, overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """Compose configs/<config_name>.yaml with these options.

    `config_dir`: a folder with further members of groups.

    Raises:
        UserError: an option or a file does not exist, or a file is not a configuration.
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
            return hydra.compose(config_name, options)
    except (HydraException, OmegaConfBaseException, OSError, yaml.YAMLError) as error:
        raise UserError(explain(error, config_name)) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # Hydra does not check all values, nor what a file sets under `hydra`.
        raise UserError(f"Hydra cannot compose this configuration: {error}") from error


def to_dict(composed: DictConfig, complete: bool = True) -> JsonDict:
    """Return a composed configuration as plain data.

    If it need not be `complete`, "???" stands for required values.

    Raises:
        UserError: a required value is missing, or a value refers to something that does not exist.
    """
    try:
        plain: JsonDict = OmegaConf.to_container(composed, resolve=True, throw_on_missing=complete)  # type: ignore
    except MissingMandatoryValue as error:
        raise UserError(f"Missing mandatory value: {error.full_key}") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {explain(error)}") from None
    for key, value in plain.items():
        if is_text(key) and isinstance(value, str | int | float):
            plain[key] = os.path.expanduser(str(value))
    return plain
