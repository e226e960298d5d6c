"""The front door of every command: Hydra composes the configuration, the command gets it as a plain dict.

Whatever a user can mend is one line on standard error and exit status 1; `--debug` shows the traceback instead.
"""

import functools
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
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

from common.console import errors, say
from common.settings import UserError, nearest

CONFIGS = Path(__file__).resolve().parent / "configs"


def command(
    config_name: str,
    run: Callable[[dict[str, Any]], None],
    text_key: str | None = None,
    when_interrupted: str = "interrupted",
) -> None:
    """Compose configs/<config_name>.yaml with the command line's overrides, and run.

    Args:
        text_key: a key whose value on the command line is taken as it is, quotes, brackets, ${} and all.
        when_interrupted: what Ctrl-C is answered with.
    """
    debug = "--debug" in sys.argv
    sys.argv[1:] = [arg for arg in sys.argv[1:] if arg != "--debug"]
    texts = _take_text(text_key)
    sys.argv[1:] = map(_bare_keys, sys.argv[1:])
    _refuse_misplaced_groups(config_name)
    _refuse_hydras_powers()
    OmegaConf.clear_resolver("oc.env")  # a file could send what is in the environment elsewhere; shells have $HOME
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost process is one line of ours, not twenty of torch's
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would have printed over many lines

    def task(composed: DictConfig) -> None:
        config = {**to_dict(composed), **texts}
        if HydraConfig.get().mode == RunMode.MULTIRUN and "run_dir" in config:  # each job of a sweep in its own folder
            config["run_dir"] = os.path.join(config["run_dir"], _job_folder())
            say(f"--- job {HydraConfig.get().job.num}: {config['run_dir']}")
        run(config)

    def guarded(composed: DictConfig) -> None:
        try:
            task(composed)
        except BrokenPipeError:
            raise
        except (UserError, OmegaConfBaseException, OSError) as error:
            if debug:
                raise
            if (
                HydraConfig.get().mode == RunMode.MULTIRUN
            ):  # the sweep goes on with its other jobs, and fails at its end
                _print_error(explain(error, config_name))
                raise
            _fail(explain(error, config_name))

    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(guarded)()
    except KeyboardInterrupt:
        _fail(when_interrupted, status=130)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, HydraException, OmegaConfBaseException, OSError) as error:
        if debug:
            raise
        _fail(explain(error, config_name))


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


def _refuse_hydras_powers() -> None:
    """Look at every configuration before Hydra acts on it: an experiment's file may be a stranger's, and is data."""
    load = ConfigLoaderImpl.load_configuration
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def checked(*args: Any, **kwargs: Any) -> DictConfig:
        composed = load(*args, **kwargs)
        for key, allowed in _HYDRAS_POWERS.items():
            given = OmegaConf.select(composed.hydra, key)
            if (OmegaConf.to_container(given) if OmegaConf.is_config(given) else given) != allowed:
                raise UserError(f"hydra.{key} is set by a configuration file or an option, which must not: remove it")
        return composed

    ConfigLoaderImpl.load_configuration = checked  # type: ignore[method-assign]


def _job_folder() -> str:
    """The folder of a sweep's job: its options, or, where that is too long, those that vary and a hash of all."""
    options = HydraConfig.get().job.override_dirname.replace("/", ".")
    if len(options) <= 200:
        return options
    varying = [option for option in HydraConfig.get().overrides.task if option not in sys.argv]
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
            return f"{group}={name} does not exist: {nearest(name, cause.options)}"
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
    return list(_keys(compose(config_name, choices)))


def compose(config_name: str, overrides: list[str]) -> DictConfig:
    """The configuration that a command with these options would get."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra.compose(config_name, overrides=overrides)


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, node):
        yield f"{prefix}{key}"
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            yield from _keys(node[key], f"{prefix}{key}.")


def _take_text(key: str | None) -> dict[str, str]:
    """Take KEY=... out of the command line, before Hydra's grammar reads it."""
    given = [arg for arg in sys.argv[1:] if key is not None and arg.startswith(f"{key}=")]
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


def _print_error(message: str) -> None:  # not in `guarded`: launchers send that to other machines, a console can't go
    errors.print(f"error: {message}", markup=False, style="red")
