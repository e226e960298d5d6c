"""The front door of every command: Hydra composes the configuration, the command gets it as a plain dict.

Whatever a user can mend is one line on standard error and exit status 1; `--debug` shows the traceback instead.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from common.command import drop_output
from common.console import errors, say
from common.settings import UserError, nearest

CONFIGS = Path(__file__).resolve().parent / "configs"


def command(
    config_name: str,
    run: Callable[[dict[str, Any]], float | None],
    text_keys: tuple[str, ...] = (),
    when_interrupted: str = "interrupted",
) -> None:
    """Compose configs/<config_name>.yaml with the command line's overrides, and run.

    Args:
        text_keys: keys whose values on the command line are taken as they are, quotes, brackets, ${} and all.
        when_interrupted: what Ctrl-C is answered with.
    """
    if {"--help", "-h"} & set(sys.argv[1:]):
        return _print_help(config_name)
    debug = "--debug" in sys.argv
    sys.argv[1:] = [arg for arg in sys.argv[1:] if arg != "--debug"]
    texts = _take_texts(text_keys)
    sys.argv[1:] = map(_bare_keys, sys.argv[1:])
    _refuse_misplaced_groups(config_name)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost process is one line of ours, not twenty of torch's
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would have printed over many lines
    job = Job(config_name, run, texts, debug)

    def task(composed: DictConfig) -> Any:  # Hydra wants a function; launchers send it to other processes and machines
        return job(composed)

    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(task)()
    except KeyboardInterrupt:
        _fail(when_interrupted, status=130)
    except BrokenPipeError:
        drop_output()
    except (UserError, HydraException, OmegaConfBaseException, OSError) as error:
        if debug:
            raise
        _fail(explain(error, config_name))


class Job:
    """What a command does with a composed configuration. A sweep's launcher may pickle it, and call it elsewhere."""

    def __init__(
        self, config_name: str, run: Callable[[dict[str, Any]], float | None], texts: dict[str, str], debug: bool
    ) -> None:
        self._config_name, self._run, self._texts, self._debug = config_name, run, texts, debug
        self._typed = sys.argv[1:]
        _restrain_hydra()

    def __setstate__(self, state: dict[str, Any]) -> None:  # in a process of the launcher's, which knows no restraint
        self.__dict__.update(state)
        _restrain_hydra()

    def __call__(self, composed: DictConfig) -> float | None:
        """Run; in a sweep, what goes wrong is said at once, the other jobs go on, and the sweep fails at its end."""
        in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        try:
            config = {**to_dict(composed), **self._texts}
            return self._run_one_of_many(config) if in_sweep and "run_dir" in config else self._run(config)
        except BrokenPipeError:  # whoever read the output has seen enough; Hydra would say more about it
            if in_sweep:
                raise
            drop_output()
            return None
        except (UserError, OmegaConfBaseException, OSError) as error:
            if self._debug:
                raise
            if not in_sweep:
                _fail(explain(error, self._config_name))
            _print_error(explain(error, self._config_name))
            raise

    def _run_one_of_many(self, config: dict[str, Any]) -> float | None:
        from trainer.sweep import among_others

        config["run_dir"] = os.path.join(config["run_dir"], _job_folder(self._typed))
        say(f"--- job {HydraConfig.get().job.num}: {config['run_dir']}")
        choices = HydraConfig.get().runtime.choices
        with among_others(choices["hydra/launcher"]):
            best = self._run(config)
        if best is None and choices["hydra/sweeper"] == "optuna":
            raise UserError("nothing was evaluated, which optuna goes by: lower eval.every, or raise stop_at")
        return best


def _print_help(config_name: str) -> None:
    try:
        print(help_of(config_name), flush=True)
    except BrokenPipeError:
        drop_output()


def help_of(config_name: str) -> str:
    """What a command is for, examples, its groups, and its keys as configs/<config_name>.yaml explains them."""
    lines = (CONFIGS / f"{config_name}.yaml").read_text(encoding="utf-8").splitlines()
    example = next(word for word in _header(config_name).split() if word.endswith(".py"))
    first, last = lines.index("") + 1, lines.index("hydra:")
    own_groups = {"train": _groups() - {"data", "tokenizer"}, "plan": set(), "prepare": {"data", "tokenizer"}}
    groups = [f"{group}: {', '.join(_members(group))}" for group in sorted(own_groups.get(config_name, set()))]
    parts = [
        _header(config_name),
        "\n".join(["Groups (GROUP=NAME):", *groups]) if groups else "",
        "\n".join(["Keys (KEY=VALUE):", *_folded(lines[first:last])]),
        f"All keys with their values: --cfg job. Tracebacks: --debug. In bash, completion with the Tab key:\n"
        f'  eval "$(python {example} -sc install=bash)"',
    ]
    return "\n\n".join(part for part in parts if part)


def _header(config_name: str) -> str:
    return str(OmegaConf.load(CONFIGS / f"{config_name}.yaml").hydra.help.header).rstrip()


def _groups() -> set[str]:
    return {str(path.parent.relative_to(CONFIGS)) for path in CONFIGS.glob("*/**/*.yaml")}


def _members(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def _folded(lines: list[str]) -> Iterator[str]:
    """Lines of a YAML, with the keys of a section beside its name: runtime.device, .dtype."""
    section = ""
    for line in filter(None, [*lines, "end"]):
        inner = re.match(r"  (\w+):", line)
        if inner:
            section += f", .{inner[1]}"
            continue
        if section:
            yield section.replace(", ", "", 1)
        section = line.rstrip(":") if line.endswith(":") else ""
        if not section and line != "end":
            yield line


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


def _restrain_hydra() -> None:
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
        _complete_plugins(composed.hydra)
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


def _complete_plugins(chosen: DictConfig) -> None:
    """What a sweep that is started again, or that has GPUs to share, needs."""
    launcher, sweeper = (chosen.runtime.choices[f"hydra/{plugin}"] for plugin in ("launcher", "sweeper"))
    if launcher == "joblib":
        from trainer.sweep import let_workers_save, visible_gpus

        let_workers_save()
        if chosen.launcher.n_jobs == -1:  # one for every CPU
            chosen.launcher.n_jobs = len(visible_gpus()) or -1
    if launcher == "submitit_slurm" and shutil.which("srun") is None:
        raise UserError(
            "hydra/launcher=submitit_slurm: there is no srun here; start the sweep where SLURM's commands are"
        )
    if sweeper == "optuna":
        from optuna import logging as optuna_logging

        if chosen.sweeper.storage is not None:
            raise UserError(
                "hydra.sweeper.storage is not needed: started again, a sweep finds its jobs by their folders"
            )
        if "seed" in chosen.sweeper.sampler and chosen.sweeper.sampler.seed is None:  # others would be other jobs
            chosen.sweeper.sampler.seed = 1
        optuna_logging.set_verbosity(optuna_logging.WARNING)


def _job_folder(typed: list[str]) -> str:
    """The folder of a sweep's job: its options, or, where that is too long, those that vary and a hash of all."""
    options = HydraConfig.get().job.override_dirname.replace("/", ".")
    if len(options) <= 200:
        return options
    varying = [option for option in HydraConfig.get().overrides.task if option not in typed]
    return ",".join(varying).replace("/", ".")[:180] + "-" + hashlib.sha256(options.encode()).hexdigest()[:8]


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


def _take_texts(keys: tuple[str, ...]) -> dict[str, str]:
    """Take KEY=... out of the command line, before Hydra's grammar reads it."""
    given = [arg for arg in sys.argv[1:] if arg.startswith(tuple(f"{key}=" for key in keys))]
    sys.argv[1:] = [arg for arg in sys.argv[1:] if arg not in given]
    return dict(arg.split("=", 1) for arg in given)


def _bare_keys(arg: str) -> str:
    """KEY={"Pile-CC": 2}, as in JSON, for Hydra's grammar, which knows no quotes around keys: KEY={Pile-CC: 2}."""
    key, _, value = arg.partition("=")
    try:
        mapping = json.loads(value) if value.startswith("{") else None
    except ValueError:
        return arg
    if not mapping:
        return arg
    members = (re.sub(r"([\\()\[\]{}:=, ])", r"\\\1", name) + ": " + json.dumps(mapping[name]) for name in mapping)
    return f"{key}={{{', '.join(members)}}}"


def _refuse_misplaced_groups(config_name: str) -> None:
    """model.attention=softmax would put a word where a whole group belongs: its name has slashes."""
    for arg in sys.argv[1:]:
        group, _, value = arg.partition("=")
        if group in ("data", "tokenizer") and config_name != "prepare":
            _fail(f"'{group}' is for scripts/prepare_data.py: give {config_name}.py what it made, dataset_dir=...")
        folder = CONFIGS / group.replace(".", "/")
        if "." in group and (folder / f"{value}.yaml").is_file():
            _fail(f"{arg} sets a value, not a group: write {group.replace('.', '/')}={value}")


def _fail(message: str, status: int = 1) -> None:
    rank = os.environ.get("LOCAL_RANK", "0")
    if rank != "0":  # what goes wrong in all processes of a machine is said by the first, and torchrun ends the others
        time.sleep(2)
        message = f"process {rank}: {message}"
    _print_error(message)
    sys.exit(status)


def _print_error(message: str) -> None:  # not in `Job`: launchers send that to other machines, a console can't go
    errors.print(f"error: {message}", markup=False, style="red")
