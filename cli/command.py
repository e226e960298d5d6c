"""What every command does: read options, compose a configuration, run, and report mistakes."""

import argparse
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pkgutil import resolve_name
from typing import Any, NoReturn, get_type_hints

import yaml
from pydantic import create_model

from cli.compose import quote_numbers, quote_texts
from cli.help import decode_explained, help_of, with_comments
from cli.mistakes import check_form, explain_dashes
from cli.stored_settings import compose_command
from cli.sweep import Work, run_sweep
from common import exits
from common.command_line import format_value
from common.console import guard_output, print_error
from common.settings import JsonDict, Settings, UserError, flatten, line_for

EXTRAS = {
    "fastapi": "serve",
    "uvicorn": "serve",
    "lm_eval": "lm-eval",
    "transformers": "hf",
    "tensorboard": "tensorboard",
    "tokenizers": "tokenizers",
    "triton": "triton",
}
"""Optional packages, each with the extra of pyproject.toml that installs it."""


def command(
    config_name: str,
    run: str,
    settings: str | None = None,
    text_keys: tuple[str, ...] = (),
    when_interrupted: str = "interrupted",
    check: str | None = None,
    after_sweep: str | None = None,
) -> None:
    """Compose configs/<config_name>.yaml with the options of the command line, and run.

    Args:
        run: the function that does the work, as "package.module:function". It is imported after the
            options have been read, so --help does not wait for torch.
        settings: the class that the configuration is decoded into, as "package.module:Class"; None:
            the keys are the function's arguments.
        text_keys: keys whose values on the command line are taken literally, with quotes, brackets
            and ${}.
        when_interrupted: the line that answers Ctrl-C.
        check: the name of a function that raises the UserErrors that can be known before `run`. A
            sweep calls it for all jobs before the first one runs.
        after_sweep: the name of a function that gets the folder of a finished sweep.
    """
    # When a process is lost, we print one line. Torch would add twenty.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # OpenMP's threads wait for each other by spinning. Where other processes use the CPU too, some
    # thread is not running, and the others would use up its time (docs/research.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    os.environ["MPLBACKEND"] = "agg"  # a notebook's may not be installed here
    logging.getLogger().setLevel(logging.ERROR)
    # A run and a server matter more than their output.
    guard_output(lossy=config_name in ("train", "serve"))
    debug = "--debug" in sys.argv
    has_begun = False

    def settings_class() -> type[Settings]:
        return resolve_name(settings) if settings else _arguments(resolve_name(run))

    def work(config: JsonDict, only_check: bool = False) -> float | None:
        nonlocal has_begun
        decoded = decode_explained(settings_class(), config, config_name)
        if only_check:
            return resolve_name(check)(decoded) if check else None
        has_begun = True
        function: Callable[..., float | None] = resolve_name(run)
        return function(decoded) if settings else function(**dict(decoded))

    status: int | str | None = 0
    try:
        words = quote_texts(sys.argv[1:], text_keys)
        _run(config_name, words, settings_class, work, after_sweep)
        sys.stdout.flush()  # here, where its failure is reported
    except SystemExit as stopped:
        status = stopped.code
    except KeyboardInterrupt:
        status = _report(when_interrupted, 130)
    except Exception as error:
        message = _line_for(error)
        if debug or not message:
            raise
        is_wrong_option = isinstance(error, UserError) and not has_begun
        status = _report(message, exits.WRONG_OPTIONS if is_wrong_option else 1)
    if status or exits.at_once:
        exits.end_process(status)


def configure(
    config_name: str,
    settings: str,
    options: Sequence[str],
    keywords: JsonDict,
    text_keys: Collection[str] = (),
) -> Any:
    """Return the settings of a command that is called from Python.

    Args:
        settings: the class of the settings, as "package.module:Class"; imported last.
        options: KEY=VALUE, as on the command line.
        keywords: values by key. A dict has those of a section.
        text_keys: as for `command`.

    Raises:
        UserError: an option is wrong.
    """
    words = quote_texts(options, text_keys)
    words += [f"{key}={format_value(value)}" for key, value in flatten(keywords).items()]
    check_form(words, config_name)
    words = quote_numbers(words, lambda: resolve_name(settings))
    config = compose_command(config_name, words)
    return decode_explained(resolve_name(settings), config, config_name)


def _line_for(error: Exception) -> str | None:
    """Return the line that reports a mistake or a missing package; None: a bug."""
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return f"{error.name} is not installed: pip install -e '.[{EXTRAS[error.name]}]'"
    return line_for(error)


def _report(message: str, status: int) -> int:
    """Print an error line, and return the exit status."""
    rank = os.environ.get("LOCAL_RANK", "0")
    if rank != "0":
        # If all processes fail, the first of a machine reports it, and torchrun ends the others.
        time.sleep(2)
        message = f"process {rank}: {message}"
    print_error(message)
    return status


def _arguments(function: Work) -> type[Settings]:
    """Return a class whose fields are a function's arguments."""
    types = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {name: (kind, ...) for name, kind in types.items() if name != "return"}
    return create_model("Arguments", __base__=Settings, **fields)


def _run(
    config_name: str,
    words: list[str],
    settings_class: Callable[[], type[Settings]],
    work: Work,
    after_sweep: str | None,
) -> None:
    """Read the command line, and do what it asks for: help, a sweep, a view, or the work."""
    if re.search("[\udc80-\udcff]", " ".join(words)):  # how Python holds bytes that are not text
        raise UserError("an option is not in UTF-8, which JSON files need: rename what it names")
    flags, dashed = _parser(config_name).parse_known_intermixed_args(words)
    if dashed:
        raise UserError(explain_dashes(words, dashed[0]))
    if flags.help:
        print(help_of(config_name))
        return
    check_form(flags.options, config_name)

    def composed(options: list[str], complete: bool = True, job: str = "") -> JsonDict:
        options = quote_numbers(options, settings_class)
        return compose_command(config_name, options, flags.config_dir, complete, job)

    if flags.multirun:
        folder = run_sweep(config_name, flags.options, composed, work, flags.debug)
        if after_sweep:
            resolve_name(after_sweep)(folder)
        return
    # An unknown key is refused at once: importing the class of the settings takes seconds.
    compose_command(config_name, flags.options, flags.config_dir, complete=False)
    config = composed(flags.options, complete=not flags.cfg)
    if flags.cfg == "run_dir":  # for scripts that look into the folder
        print(config["run_dir"])
    elif flags.cfg:
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        print(with_comments(text, config, config_name), end="")
    else:
        work(config)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parser(config_name: str) -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("options", nargs="*")
    parser.add_argument("-h", "-help", "--help", action="store_true")
    parser.add_argument("--debug", action="store_true")
    views = ["job", "run_dir"] if config_name in ("train", "plan") else ["job"]
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("-m", "--multirun", action="store_true")
    modes.add_argument("-c", "--cfg", choices=views)
    parser.add_argument("-cd", "--config-dir")
    return parser
