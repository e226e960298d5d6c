"""Reads every command line and composes configurations. The only package that imports Hydra.

A command gets its configuration as a plain dict. A user's mistake is one line on standard error and
exit status 1 or 2; `--debug` shows the traceback instead. From Python it is a UserError.
"""

from cli.command import command, configure
from cli.compose import CONFIGS, compose

__all__ = ["CONFIGS", "command", "compose", "configure"]
