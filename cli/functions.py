"""Commands as functions: train("experiment=quickstart", run_dir="runs/demo", max_steps=100)."""

from collections.abc import Collection, Sequence
from pkgutil import resolve_name
from typing import Any

from cli.compose import quote_texts, with_typed_texts
from cli.help import decode_explained
from cli.mistakes import check_form
from cli.stored_settings import compose_command
from common.command_line import in_hydras_grammar
from common.settings import JsonDict, flat


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
    words += [f"{key}={in_hydras_grammar(value)}" for key, value in flat(keywords).items()]
    check_form(words, config_name)
    config = compose_command(config_name, words)
    config = with_typed_texts(config, words, lambda: resolve_name(settings))
    return decode_explained(resolve_name(settings), config, config_name)
