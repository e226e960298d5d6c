"""Sweeps: Hydra's sweepers choose the values, its launchers run the jobs, and each job composes its
own configuration.

Hydra sees the options that have several values, and those for Hydra itself, but no configuration
file. So a file controls neither what Hydra calls nor what it writes.
"""

import itertools
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import common.console
from cli.compose import parse_options
from cli.mistakes import explain_error
from cli.workers import let_workers_save, share_machine, visible_gpus
from common.console import print_error, say, warn
from common.files import name_of, refuse_foreign
from common.settings import JsonDict, UserError, line_for

Work = Callable[..., float | None]
"""What a command does with a configuration; training returns the lowest validation loss. With
only_check=True, it only raises the UserErrors that can be known before."""

ConfigOfJob = Callable[[Sequence[str]], JsonDict]
"""Returns the configuration of a job, given the options that vary."""

_ERROR = "error.txt"
"""The file in a job's folder that says why it failed."""


_HYDRA = """
defaults: [_self_, override hydra/job_logging: disabled, override hydra/hydra_logging: disabled]
hydra: {output_subdir: null, sweep: {dir: null, subdir: .}, job: {name: null}}
"""
"""Hydra's settings for a sweep. Our commands print for themselves."""


class AlreadyReportedError(Exception):
    """A job of a sweep failed and has printed why."""


def run_sweep(
    config_name: str, options: list[str], composed: Callable[..., JsonDict], work: Work, debug: bool
) -> Path:
    """Run a command once for every combination of values that Hydra's sweeper asks for.

    Args:
        composed: composes a configuration from options, for a job by its name.

    Returns:
        The folder of the runs.

    Raises:
        UserError: an option is wrong, or jobs have failed.
    """
    try:
        fixed, choices, swept, for_hydra = _sort_options(options)
        # The folder, by the configuration of the first job.
        first_job = [*fixed, *(values[0] for values in choices)]
        folder = Path(composed(first_job, complete=False).get("run_dir", f"multirun/{config_name}"))
        if folder == Path():
            raise UserError(
                "run_dir is empty, or this folder: give one for the sweep, such as "
                "run_dir=runs/sweep"
            )
        chosen = _settings_of_hydra(config_name, str(folder), list(swept), for_hydra).hydra
        sweeper = chosen.runtime.choices["hydra/sweeper"]

        def config_of(varied: Sequence[str]) -> JsonDict:
            named = sorted(option for option in varied if not option.startswith("run_dir="))
            return composed([*fixed, *varied], job=name_of(named))

        # Mistakes in any job are said before the first one runs.
        jobs = [*(itertools.product(*choices) if sweeper == "basic" else _each_once(choices))]
        _check_jobs(work, config_of, jobs)
        if not swept and not for_hydra:
            say("-m with one value for every key runs one job: write seed=1,2 for several")
        refuse_foreign(b"hydra:", folder / "multirun.yaml")
        refuse_foreign(b"name: optuna", folder / "optimization_results.yaml")
        for old in folder.glob(f"*=*/{_ERROR}"):
            old.unlink()
        # Hydra reads the command line again. It then raises what it would print over many lines.
        os.environ["HYDRA_FULL_ERROR"] = "1"
        for_plugins = _settings_of_plugins(chosen, bool(swept))
        sys.argv[1:] = ["-m", *swept.values(), *for_hydra, *for_plugins]
        job = _job(work, config_of, debug, chosen.sweeper.get("n_trials", len(jobs)))
        hydra.main(version_base="1.3", config_path=None, config_name="sweep")(job)()
        if sweeper == "optuna":
            _check_search(folder)
        return folder
    except (AlreadyReportedError, BrokenExecutor) as error:
        why = f"see above{_failed_jobs(folder)}"
        if isinstance(error, BrokenExecutor):
            why = "a worker was killed: no memory?"
        remedy = "Fix the cause and run the same command again: finished jobs are skipped"
        raise UserError(f"some jobs of the sweep failed ({why}). {remedy}") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain_error(error, config_name)) from error


def _check_jobs(work: Work, config_of: ConfigOfJob, jobs: Iterable[Sequence[str]]) -> None:
    """Raise the UserError of the first job with a mistake that can be known before it runs."""
    for varied in jobs:
        try:
            work(config_of(varied), only_check=True)
        except UserError as error:
            name = f"job {' '.join(varied)}: " if varied else ""
            raise UserError(f"{name}{error}; no job was started") from None


def _job(work: Work, config_of: ConfigOfJob, debug: bool, n_jobs: int) -> Work:
    """Return the function that Hydra calls for each job. Launchers pickle it."""
    results: dict[str, float | None] = {}

    def job(_: DictConfig) -> float | None:
        varied = HydraConfig.get().overrides.task
        key = " ".join(varied)
        title = f"--- job {HydraConfig.get().job.num + 1} of {n_jobs}"
        if key in results:  # a search may choose the same values again
            say(f"{title}: the earlier result of {key}")
        else:
            results[key] = _run_job(work, config_of(varied), debug, title)
        return results[key]

    return job


def _check_search(folder: Path) -> None:
    """Raise UserError if all runs of a search failed."""
    text = (folder / "optimization_results.yaml").read_text(encoding="utf-8")
    if math.isinf(yaml.safe_load(text)["best_value"]):
        raise UserError(
            "every run of the search failed (see above): change what it varies, or what all runs "
            "share"
        )
    failed = _failed_jobs(folder)
    if failed:
        warn(f"some runs failed and count as the worst{failed}")


def _failed_jobs(folder: Path) -> str:
    names = sorted(path.parent.name for path in folder.glob(f"*=*/{_ERROR}"))
    return f": {', '.join(names)}" if names else ""


def _sort_options(
    options: list[str],
) -> tuple[list[str], list[list[str]], dict[str, str], list[str]]:
    """Sort the options of a sweep.

    Returns:
        fixed: options that all jobs have.
        choices: for each key with several values, KEY=VALUE for each value.
        swept: by key, the option with several values or a range.
        for_hydra: options for Hydra itself.
    """
    fixed: list[str] = []
    choices: list[list[str]] = []
    swept: dict[str, str] = {}
    for_hydra: list[str] = []
    # A key that is given twice has its last value.
    last_of_key = {option.get_key_element(): option for option in parse_options(options)}
    for key, option in last_of_key.items():
        word = str(option.input_line)
        if option.is_hydra_override():
            for_hydra.append(word)
        elif option.is_sweep_override():
            swept[key] = word
            if option.is_discrete_sweep():
                choices.append(_choices_of(key, option))
        else:
            fixed.append(word)
    return fixed, choices, swept, for_hydra


def _choices_of(key: str, option: Override) -> list[str]:
    """Return KEY=VALUE for each value of an option. Raises UserError if it names none."""
    choices = []
    if option.value_type is not ValueType.GLOB_CHOICE_SWEEP:
        choices = [f"{key}={value}" for value in option.sweep_string_iterator()]
    if not choices:
        raise UserError(f"{option.input_line} names no value: write {key}=a,b for a run with each")
    return choices


def _run_job(work: Work, config: JsonDict, debug: bool, title: str) -> float | None:
    """Run one job of a sweep. One that fails in a search is a result, too: the worst value."""
    by_hydra = HydraConfig.get()
    searches = by_hydra.runtime.choices["hydra/sweeper"] == "optuna"
    run_dir = Path(config["run_dir"]) if "run_dir" in config else None
    try:
        with share_machine(by_hydra.runtime.choices["hydra/launcher"]):
            if run_dir:
                common.console.has_shown_header = by_hydra.job.num > 0
                say(f"{title}: {run_dir}")
            best = work(config)
            if run_dir:  # another sweep may have found this job running, and noted its refusal
                (run_dir / _ERROR).unlink(missing_ok=True)
    except Exception as error:
        message = line_for(error)
        if debug or not message:
            raise
        # Say why at once, and in the job's folder. The other jobs continue.
        print_error(message)
        if run_dir:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / _ERROR).write_text(message + "\n", encoding="utf-8")
        # A full disk says nothing about the values that were tried.
        if searches and not isinstance(error, OSError):
            return math.inf
        raise AlreadyReportedError from None
    finally:
        common.console.has_shown_header = False
    if best is None and searches:
        print_error("no validation loss for optuna to compare: lower eval.every, or raise stop_at")
        raise AlreadyReportedError
    return best


def _each_once(values: Sequence[Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """Yield jobs in which every value occurs, for a sweeper that need not try every combination."""
    for i in range(max(map(len, values), default=1)):
        yield tuple(choices[i % len(choices)] for choices in values)


def _settings_of_hydra(
    config_name: str, folder: str, keys: list[str], options: list[str]
) -> DictConfig:
    """Give Hydra the configuration of a sweep, with an empty entry for every key with values.

    Returns:
        The configuration, with Hydra's own settings and the options for them.
    """
    config = OmegaConf.create(_HYDRA)
    OmegaConf.update(config, "hydra.sweep.dir", folder)
    OmegaConf.update(config, "hydra.job.name", config_name)
    for key in keys:
        OmegaConf.update(config, key, None)
    ConfigStore.instance().store("sweep", config)
    GlobalHydra.instance().clear()
    with hydra.initialize(version_base="1.3", config_path=None):
        return hydra.compose("sweep", options, return_hydra_config=True)


def _settings_of_plugins(chosen: DictConfig, has_values: bool) -> list[str]:
    """Return further options that a launcher and a sweeper need.

    Args:
        has_values: whether there is something to try.

    Raises:
        UserError: a launcher or a sweeper cannot work with these options.
    """
    launcher = chosen.runtime.choices["hydra/launcher"]
    sweeper = chosen.runtime.choices["hydra/sweeper"]
    more = []
    if launcher == "joblib":
        if chosen.launcher.n_jobs == 0:
            raise UserError(
                "hydra.launcher.n_jobs=0 starts no worker: use 1 or more, or -1 for one per GPU or "
                "CPU"
            )
        let_workers_save()
        if chosen.launcher.n_jobs == -1 and visible_gpus():
            more.append(f"hydra.launcher.n_jobs={len(visible_gpus())}")
    if launcher == "submitit_slurm" and shutil.which("srun") is None:
        raise UserError(
            "hydra/launcher=submitit_slurm needs srun: start the sweep on a machine with SLURM's "
            "commands"
        )
    if sweeper == "optuna":
        from optuna import logging as optuna_logging

        for key in ("n_trials", "n_jobs"):
            if chosen.sweeper[key] < 1:
                raise UserError(
                    f"hydra.sweeper.{key}={chosen.sweeper[key]} is too few: use 1 or more"
                )
        if not has_values:
            raise UserError(
                "hydra/sweeper=optuna has nothing to search: give a range or choices, such as "
                "'optim.max_lr=tag(log, interval(1e-3, 1e-2))'"
            )
        if "seed" in chosen.sweeper.sampler and chosen.sweeper.sampler.seed is None:
            # A restarted sweep must ask for the same jobs.
            more.append("hydra.sweeper.sampler.seed=1")
        optuna_logging.set_verbosity(optuna_logging.WARNING)
    return more
