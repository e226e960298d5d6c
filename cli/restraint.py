"""What configuration files may not make Hydra do, and what its sweepers and launchers need of us."""

import functools
import shutil
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from cli.compose import CONFIGS
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
        is_job = kwargs.get("run_mode") == RunMode.RUN  # of a sweep or by itself: its options have one value each
        complete_plugins(composed.hydra, is_job or any(option.is_sweep_override() for option in typed))
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


def complete_plugins(chosen: DictConfig, searched: bool) -> None:
    """What a sweep that is started again, or that has GPUs to share, needs. `searched`: some option has several values.

    Raises:
        UserError: a launcher or a sweeper cannot work so.
    """
    launcher, sweeper = (chosen.runtime.choices[f"hydra/{plugin}"] for plugin in ("launcher", "sweeper"))
    if launcher == "joblib":
        from trainer.sweep import let_workers_save, visible_gpus

        if chosen.launcher.n_jobs == 0:
            raise UserError("hydra.launcher.n_jobs=0 is no worker: use 1 or more, or -1 for one for every GPU or CPU")
        let_workers_save()
        if chosen.launcher.n_jobs == -1:  # one for every CPU
            chosen.launcher.n_jobs = len(visible_gpus()) or -1
    if launcher == "submitit_slurm" and shutil.which("srun") is None:
        raise UserError(
            "hydra/launcher=submitit_slurm: there is no srun here; start the sweep where SLURM's commands are"
        )
    if sweeper == "optuna":
        from optuna import logging as optuna_logging

        for key in ("n_trials", "n_jobs"):
            if chosen.sweeper[key] < 1:
                raise UserError(f"hydra.sweeper.{key}={chosen.sweeper[key]} is too few: use 1 or more")
        if chosen.sweeper.storage is not None:
            raise UserError(
                "hydra.sweeper.storage is not needed: started again, a sweep finds its jobs by their folders"
            )
        if not (searched or chosen.sweeper.get("params")):
            raise UserError(
                "hydra/sweeper=optuna has nothing to search: give a range or choices, such as "
                "'optim.max_lr=tag(log, interval(1e-3, 1e-2))'"
            )
        if "seed" in chosen.sweeper.sampler and chosen.sweeper.sampler.seed is None:  # others would be other jobs
            chosen.sweeper.sampler.seed = 1
        optuna_logging.set_verbosity(optuna_logging.WARNING)
