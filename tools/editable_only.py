"""The build of pyproject.toml: editable installs alone, because commands need configs/."""

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
