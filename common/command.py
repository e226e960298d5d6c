"""What the scripts outside Hydra share: options as KEY=VALUE words, --help, one-line errors and a clean Ctrl-C.

It also writes settings the way a command line takes them, for the commands that programs print.
"""

from common.interrupts import allow_cleanup  # first

# isort: split
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pkgutil import resolve_name
from textwrap import fill
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from common.console import print_error
from common.settings import Settings, UserError, decode

EXTRAS = {"fastapi": "serve", "uvicorn": "serve", "lm_eval": "lm-eval", "transformers": "hf"} | {
    name: name for name in ("tensorboard", "tokenizers", "triton")
}
"""Packages that not every installation has, and the extra of pyproject.toml that installs each."""

T = TypeVar("T")


def _split(value: Any) -> Any:
    """Split "a,b" or "[a,b]" into its items. Brackets protect the commas of an item: "[a,b],[c]" is "a,b" and "c".

    A path that exists is one item: the folders of a sweep's jobs have commas in their names.
    """
    if not isinstance(value, str):
        return value
    if "=" in value and os.path.exists(value):
        return [value]
    bracketed = re.fullmatch(r"\[((?:[^][]|\[[^][]*\])*)\]", value)
    items = bracketed[1] if bracketed else value
    return [re.sub(r"^\[(.*)\]$", r"\1", item.strip()) for item in re.split(r",(?![^][]*\])", items)] if items else []


def _joined(items: Iterable[Any]) -> str:
    return ",".join(f"[{item}]" if "," in str(item) else str(item) for item in items)


Items = Annotated[list[T], BeforeValidator(_split)]
"""The type of an option that takes several values: KEY=a,b or KEY=[a,b]."""


def run_script(
    doc: str | None,
    options: type[Settings],
    run: str,
    argv: Sequence[str] | None = None,
    when_interrupted: str = "interrupted",
) -> NoReturn:
    """Run with the command line's options, and exit.

    A UserError or OSError prints one line on standard error and exits with 1, unless --debug asks for the traceback.
    Ctrl-C exits with 130.

    Args:
        doc: what the script does, with examples, for --help.
        options: one field per option; --help shows the fields' docstrings.
        run: the name, "package.module:function", of a function that takes the options as keyword arguments. It is
            imported after the options are read: --help needs no torch.
        when_interrupted: the message after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words

    def main() -> None:
        if {"--help", "-h"} & set(words):
            return print(_help(doc or "", options))
        decoded = decode(options, _given([word for word in words if word != "--debug"], options))
        function = resolve_name(run)
        allow_cleanup()
        function(**dict(decoded))

    sys.exit(reported(main, debug, when_interrupted))


def reported(run: Callable[[], None], debug: bool, when_interrupted: str) -> int:
    """Run, report a mistake or a missing package in one line on standard error, and return the exit status."""
    try:
        run()
        sys.stdout.flush()  # here, where a closed pipe is not an error
        return 0
    except BrokenPipeError:  # the reader has seen enough, and gets no more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        message, status = when_interrupted, 130
    except ModuleNotFoundError as error:
        if debug or error.name not in EXTRAS:
            raise
        message, status = f"{error.name} is not installed: pip install -e '.[{EXTRAS[error.name]}]'", 1
    except (UserError, OSError) as error:
        if debug:
            raise
        message, status = " ".join(str(error).split()), 1
        if isinstance(error, OSError) and error.filename:
            message = f"{error.filename}: {error.strerror}"
    rank = os.environ.get("LOCAL_RANK", "0")
    if rank != "0":  # the first process of a machine reports what all of them meet, and torchrun ends the others
        time.sleep(2)
        message = f"process {rank}: {message}"
    print_error(message)
    return status


def _given(words: list[str], options: type[Settings]) -> dict[str, str | None]:
    """Return the text of every KEY=VALUE word by key, None for null."""
    given: dict[str, str | None] = {}
    for word in words:
        refuse_flag(word)
        key, equals, value = word.partition("=")
        if not equals:
            paths = [key for key, field in options.model_fields.items() if "Path" in str(field.annotation)]
            meant = f": write {paths[0]}={word}" if paths and os.path.exists(word) else " (--help shows every key)"
            raise UserError(f"{word}: options are KEY=VALUE here{meant}")
        given[key] = None if value == "null" else value
    return given


def refuse_flag(word: str) -> None:
    """Refuse an option with dashes, and show how it is written here; refuse one that is not text."""
    if re.search("[\udc80-\udcff]", word):  # how Python holds bytes that are not UTF-8; JSON files cannot hold them
        raise UserError(f"{word} is not in UTF-8: rename what it names")
    if word == "--":
        raise UserError("--: leave it out: options are KEY=VALUE here")
    if word.startswith("-"):
        key, _, value = word.lstrip("-").partition("=")
        raise UserError(f"{word}: options are KEY=VALUE here: write {key.replace('-', '_')}={value or '...'}")


def _help(doc: str, options: type[Settings]) -> str:
    keys = {f"{key}: {_default(field)}": field.description for key, field in options.model_fields.items()}
    width = max((len(key) for key in keys if len(key) <= 40), default=0)
    lines = [fill(f"{key:{width}}   # {text}", 120, subsequent_indent="    # ") for key, text in keys.items()]
    return "\n".join([doc.rstrip(), "", "Keys (KEY=VALUE):", *lines, "", "Tracebacks: --debug."])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "???"
    if isinstance(field.default, list):
        return f"[{_joined(field.default)}]"
    return json.dumps(field.default) if field.default in (None, False, True) else str(field.default)


_NO_TEXTS = ("null", "true", "false", "nan", "inf")


def overrides(settings: Mapping[str, Any]) -> str:
    """Return settings as command-line arguments in Hydra's grammar, quoted for a shell."""
    return shlex.join(options_of(settings))


def options_of(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as command-line arguments in Hydra's grammar, each as the program gets it."""
    return [f"{key}={in_hydras_grammar(value)}" for key, value in settings.items()]


def in_hydras_grammar(value: Any) -> str:
    """Return a value as Hydra's grammar writes it; texts that it would read as something else are quoted."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{in_hydras_grammar(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(in_hydras_grammar, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    if re.fullmatch(r"[\w./-]*[a-z_/]{2}[\w./-]*", value, re.ASCII) and value.lower() not in _NO_TEXTS:
        return value
    return "'" + re.sub(r"(\\+)(?='|$)", r"\1\1", value).replace("'", r"\'") + "'"
