"""Composes configurations from YAML files and options, and explains in one line what is wrong with them.

Files are data: what they set for Hydra itself has no effect, and they cannot read the environment.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, errors

from cli.options import as_text, bare_keys, groups_of, is_text, meant, takes_one_name
from common.command_line import in_hydras_grammar
from common.settings import CONFIGS, JsonDict, UserError, nearest

OmegaConf.clear_resolver(
    "oc.env"
)  # a downloaded experiment could send the environment elsewhere; shells have $HOME


def compose(config_name: str, overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """Compose configs/<config_name>.yaml with these options. `config_dir`: a folder with further members of groups.

    Raises:
        UserError: an option or a file does not exist, or a file is not a configuration.
    """
    options = read_options(overrides)
    if config_dir:
        folder = Path(os.path.expanduser(config_dir)).resolve()
        if not folder.is_dir():
            raise UserError(
                f"--config-dir {config_dir} is not a folder: give one with files of groups, like configs/"
            )
        options.append(f"hydra.searchpath=[{in_hydras_grammar(f'file://{folder}')}]")
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra.compose(config_name, options)
    except (HydraException, errors.OmegaConfBaseException, OSError, yaml.YAMLError) as error:
        general = [option for option in overrides if "." not in option.partition("=")[0]]
        if len(general) < len(overrides):
            compose(config_name, general, config_dir)  # a mistake in a file comes first
        raise UserError(explain(error, config_name)) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # Hydra does not check what a file sets under `hydra`.
        raise UserError(
            f"Hydra failed ({error!r}): if a configuration file sets hydra, remove that"
        ) from error
    for group in groups_of(config_name):
        section = group.replace("/", ".")
        found = OmegaConf.select(composed, section, default={})
        if not OmegaConf.is_dict(found) and found != {}:
            above, name = group.rpartition("/")[0], "NAME" if found is None else found
            shorter = f", without /{above}/ in a file of {above}/" if above else ""
            what = f"a file sets {section} to {found}: to choose a file of configs/{group}"
            raise UserError(f"{what}, write defaults: [override /{group}: {name}]{shorter}")
    return composed


def read_options(options: list[str], in_sweep: bool = False) -> list[str]:
    """Return options as Hydra's grammar writes them.

    Raises:
        UserError: a bracket or a quote is not closed, or an option has several values outside of a sweep.
    """
    parse, read = OverridesParser.create().parse_override, []
    for option in (
        bare_keys(option.lstrip("+")) for option in options
    ):  # Hydra adds keys by +; here all are there
        try:
            parsed = parse(option)
        except HydraException:
            read.append(as_text(option))
            continue
        if parsed.is_sweep_override() and not in_sweep:
            key, _, value = option.partition("=")
            more = (
                ""
                if "(" in value or takes_one_name(key)
                else f"; if {key} is a list, write '{key}=[{value}]'"
            )
            if is_text(key):
                more += f"; if it is one text, write '{key}=\"{value}\"'"
            elif re.fullmatch(r"-?\d+,\d+|\d+(,\d{3})+", value):
                point = "" if re.fullmatch(r"[1-9]\d*(,\d{3})+", value) else "."
                more += f"; for one number, write {key}={value.replace(',', point)}"
            raise UserError(f"{option} has several values: add -m for a run with each{more}")
        read.append(
            as_text(option)
            if is_text(option) and isinstance(parsed.value(), int | float)
            else option
        )
    return read


def keys_and_values(options: list[str]) -> JsonDict:
    """Return the options' values by key, in the form that Hydra's grammar gives them; "~" if one deletes a key."""
    parsed = OverridesParser.create().parse_overrides(read_options(options))
    return {"~" if each.is_delete() else each.key_or_group: each.value() for each in parsed}


def to_dict(composed: DictConfig, complete: bool = True) -> JsonDict:
    """Return a composed configuration as plain data. If it need not be complete, "???" stands for required values.

    Raises:
        UserError: a required value is missing, or a value refers to something that does not exist.
    """
    try:
        plain: JsonDict = OmegaConf.to_container(composed, resolve=True, throw_on_missing=complete)  # type: ignore
    except errors.MissingMandatoryValue as error:
        key = error.full_key
        raise UserError(
            f"config key '{key}' is missing: give it a value, as in {key}=..."
        ) from None
    except errors.OmegaConfBaseException as error:
        raise UserError(explain(error)) from None
    texts = {
        key: str(value)
        for key, value in plain.items()
        if is_text(key) and isinstance(value, str | int | float)
    }
    return plain | {key: os.path.expanduser(text) for key, text in texts.items()}


def explain(error: BaseException, config_name: str = "") -> str:
    """Return one line that explains Hydra's error, with the nearest valid name."""
    cause: BaseException | None = error
    while cause is not None:
        group, _, name = (getattr(cause, "missing_cfg_file", None) or "").rpartition("/")
        if options := getattr(cause, "options", None) or groups_of(config_name).get(group):
            more = "; pip install -e '.[sweep]' adds others" if group.startswith("hydra/") else ""
            return f"{group}={name} does not exist: {nearest(name, options)}{more}"
        if found := re.match(r"Could not delete .*?'(.*?)'", str(cause)):
            return f"~{found[1]} takes nothing away here: set keys instead, to null where --cfg job shows it is allowed"
        if isinstance(cause, errors.InterpolationResolutionError | errors.GrammarParseError):
            key = str(cause.full_key).replace("_dummy_", "a group")
            return f"{key}: ${{...}} refers to nothing that is available: write the value, in a shell as $NAME"
        if (
            isinstance(cause, errors.ConfigKeyError | errors.ConfigAttributeError)
            and cause.parent_node is not None
        ):
            key, every = (
                str(cause.full_key),
                _keys(OmegaConf.to_container(cause.parent_node._get_root())),
            )
            keys = [
                other
                for other in every
                if (other.split(".")[0] == "hydra") == key.startswith("hydra.")
            ]
            if key not in keys:
                return f"unknown config key '{key}': {meant(key, keys, groups_of(config_name))}"
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())


def _keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key, including the keys of sections."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")
