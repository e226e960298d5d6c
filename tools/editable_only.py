"""The build of pyproject.toml: setuptools, but for editable installs only, as commands need
configs/ beside them."""

import sys
from typing import NoReturn

from setuptools.build_meta import *  # noqa: F403


def build_wheel(*_: object) -> NoReturn:
    """Refuse `pip install .` before pip downloads anything."""
    sys.exit(
        "error: log-gpt works in its own folder, with train.py and configs/: install with pip "
        "install -e ."
    )


prepare_metadata_for_build_wheel = build_wheel
