"""Names packages that a Python lacks, before they are imported. This file needs nothing but Python."""

import importlib.util
import sys

_INSTALLED_AS = {"hydra": "hydra-core", "yaml": "PyYAML"}


def refuse_without(*modules: str) -> None:
    """Exit with one line if a module is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join(_INSTALLED_AS.get(name, name) for name in missing)
        sys.exit(f"error: {sys.executable} lacks {', '.join(missing)}: pip install {packages}")
