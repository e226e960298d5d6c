"""What every command does with its command line: options are read, a configuration is composed, the command runs."""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from cli.compose import CONFIGS, explain, to_dict
from cli.help import print_help
from cli.restraint import restrain_hydra
from common.command import drop_output
from common.console import errors, say
from common.settings import UserError

_SAID = "It has been said."  # of what went wrong in a job of a sweep


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
        return print_help(config_name)
    debug = "--debug" in sys.argv
    sys.argv[1:] = [arg for arg in sys.argv[1:] if arg != "--debug"]
    _refuse_dashes()
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
        sys.stdout.flush()  # here, where a reader that is gone is no error
    except KeyboardInterrupt:
        _fail(when_interrupted, status=130)
    except BrokenPipeError:
        drop_output()
    except (UserError, HydraException, OmegaConfBaseException, OSError) as error:
        if debug:
            raise
        said = _SAID in getattr(error, "__notes__", [])
        _fail(
            "jobs of the sweep failed, as said above; mended, the same command goes on"
            if said
            else explain(error, config_name)
        )


class Job:
    """What a command does with a composed configuration. A sweep's launcher may pickle it, and call it elsewhere."""

    def __init__(
        self, config_name: str, run: Callable[[dict[str, Any]], float | None], texts: dict[str, str], debug: bool
    ) -> None:
        self._config_name, self._run, self._texts, self._debug = config_name, run, texts, debug
        self._typed = sys.argv[1:]
        restrain_hydra()

    def __setstate__(self, state: dict[str, Any]) -> None:  # in a process of the launcher's, which knows no restraint
        self.__dict__.update(state)
        restrain_hydra()

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
            error.add_note(_SAID)
            raise

    def _run_one_of_many(self, config: dict[str, Any]) -> float | None:
        from cli.sweep import among_others

        config["run_dir"] = os.path.join(config["run_dir"], _job_folder(self._typed))
        say(f"--- job {HydraConfig.get().job.num}: {config['run_dir']}")
        choices = HydraConfig.get().runtime.choices
        with among_others(choices["hydra/launcher"]):
            best = self._run(config)
        if best is None and choices["hydra/sweeper"] == "optuna":
            raise UserError("nothing was evaluated, which optuna goes by: lower eval.every, or raise stop_at")
        return best


def _job_folder(typed: list[str]) -> str:
    """The folder of a sweep's job: its options, or, where that is too long, those that vary and a hash of all."""
    options = HydraConfig.get().job.override_dirname.replace("/", ".")
    if len(options) <= 200:
        return options
    varying = [option for option in HydraConfig.get().overrides.task if option not in typed]
    return ",".join(varying).replace("/", ".")[:180] + "-" + hashlib.sha256(options.encode()).hexdigest()[:8]


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


def _refuse_dashes() -> None:
    """--KEY=VALUE is how others write options; Hydra's own flags have dashes here, too."""
    flags = get_args_parser()._option_string_actions
    for arg in sys.argv[1:]:
        if arg.startswith("--") and arg.partition("=")[0] not in flags:
            _fail(f"{arg}: options have no dashes here: write {arg.lstrip('-')}{'' if '=' in arg else '=...'}")


def _fail(message: str, status: int = 1) -> None:
    rank = os.environ.get("LOCAL_RANK", "0")
    if rank != "0":  # what goes wrong in all processes of a machine is said by the first, and torchrun ends the others
        time.sleep(2)
        message = f"process {rank}: {message}"
    _print_error(message)
    sys.exit(status)


def _print_error(message: str) -> None:  # not in `Job`: launchers send that to other machines, a console can't go
    errors.print(f"error: {message}", markup=False, style="red")
