"""The front door of every command, and the only package that imports Hydra: it composes configurations.

A command gets its configuration as a plain dict. Whatever a user can mend is one line on standard error and exit status
1; `--debug` shows the traceback instead.
"""

from cli.command import command
from cli.compose import CONFIGS, compose, to_dict

__all__ = ["CONFIGS", "command", "compose", "to_dict"]
