"""What configuration files may not make Hydra do."""

import functools
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from cli.compose import CONFIGS
from cli.plugins import complete_plugins
from common.settings import UserError

# What a configuration file could make Hydra call, import, put into the environment or write to: it stays as it is.
_NO_LOGGING = {"version": 1, "root": {"level": "ERROR"}, "disable_existing_loggers": True}
_HYDRAS_POWERS: dict[str, Any] = {
    "callbacks": {},
    "job_logging": _NO_LOGGING,
    "hydra_logging": _NO_LOGGING,
    "job.env_set": {},
    "job.env_copy": [],
    "job.chdir": False,
    "run.dir": ".",
    "output_subdir": None,
    "searchpath": [],
}


def restrain_hydra() -> None:
    """Look at every configuration before Hydra acts on it: an experiment's file may be a stranger's, and is data."""
    OmegaConf.clear_resolver("oc.env")  # a file could send what is in the environment elsewhere; shells have $HOME
    load = ConfigLoaderImpl.load_configuration
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def checked(
        loader: ConfigLoaderImpl, config_name: str | None, overrides: list[str], *args: Any, **kwargs: Any
    ) -> DictConfig:
        composed = load(loader, config_name, overrides, *args, **kwargs)
        for key, allowed in _HYDRAS_POWERS.items():
            given = OmegaConf.select(composed.hydra, key)
            if (OmegaConf.to_container(given) if OmegaConf.is_config(given) else given) != allowed:
                raise UserError(f"hydra.{key} is set by a configuration file or an option, which must not: remove it")
        typed = OverridesParser.create(config_loader=loader).parse_overrides(overrides)
        for_hydra = [str(option.input_line) for option in typed if option.is_hydra_override()]
        ours = ConfigLoaderImpl(create_config_search_path(str(CONFIGS)))
        _check_equal(composed, load(ours, config_name, for_hydra, *args, **kwargs))
        if kwargs.get("run_mode") != RunMode.RUN:  # a job, of a sweep or by itself, starts no plugin
            complete_plugins(composed.hydra, any(option.is_sweep_override() for option in typed))
        return composed

    ConfigLoaderImpl.load_configuration = checked  # type: ignore[assignment, method-assign]


def _check_equal(composed: DictConfig, trusted: DictConfig) -> None:
    """All that is Hydra's must be what the command line's options for Hydra, and no others, make of our own files."""
    given, ours = (OmegaConf.to_container(config.hydra, enum_to_str=True) for config in (composed, trusted))
    assert isinstance(given, dict)
    assert isinstance(ours, dict)
    for node in (given, ours):  # what Hydra itself writes into it
        del node["runtime"], node["overrides"]["task"], node["job"]["override_dirname"]
    for key in {**ours, **given}:
        if given.get(key) != ours.get(key):
            raise UserError(f"hydra.{key} is set by a configuration file, which must not: give it on the command line")
