"""What the scripts with options of argparse's have in common: their --help, errors of one line, and a clean Ctrl-C.

And how settings are written in commands that are printed.
"""

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.console import errors
from common.settings import UserError


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose --help shows a script's docstring as it stands, and that knows --debug."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def positive(text: str) -> int:
    """An option's whole number from 1 on, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def run_script(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int | None],
    argv: Sequence[str] | None = None,
    when_interrupted: str = "interrupted",
) -> int:
    """Run with the command line's options; returns the exit status, run's own or 0 where all went well.

    What a user can mend is one line on standard error and 1, unless --debug asks for the traceback; Ctrl-C is 130.

    Args:
        parser: of `parser_of`.
        when_interrupted: what Ctrl-C is answered with.
    """
    options = parser.parse_args(argv)
    try:
        status = run(options) or 0
        sys.stdout.flush()  # here, where a reader that is gone is no error
        return status
    except KeyboardInterrupt:
        errors.print(f"error: {when_interrupted}", markup=False, style="red")
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough
        drop_output()
        return 0
    except (UserError, OSError) as error:
        if options.debug:
            raise
        errors.print(f"error: {error}", markup=False, style="red")
        return 1


def drop_output() -> None:
    """Send what is still to be printed nowhere: whoever read it is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_NO_TEXTS = ("null", "true", "false", "nan", "inf")


def overrides(settings: Mapping[str, Any]) -> str:
    """Settings of plain data as a shell's command line takes them, in Hydra's grammar."""
    return " ".join(shlex.quote(f"{key}={_in_hydras_grammar(value)}") for key, value in settings.items())


def _in_hydras_grammar(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_in_hydras_grammar(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_in_hydras_grammar, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    if re.fullmatch(r"[\w./-]*[a-z_/]{2}[\w./-]*", value, re.ASCII) and value.lower() not in _NO_TEXTS:
        return value
    return "'" + re.sub(r"(\\+)(?='|$)", r"\1\1", value).replace("'", r"\'") + "'"
