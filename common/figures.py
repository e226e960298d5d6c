"""Helpers for all plots, which share one style."""

import io
import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib.style
from matplotlib.figure import Figure

from common.console import warn_once

matplotlib.style.use(Path(__file__).with_name("style.mplstyle"))


def encode_png(figure: Figure) -> bytes:
    """Return the figure as the content of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def draw_or_warn(name: str, draw: Callable[[], bytes]) -> bytes | None:
    """Return the picture that `draw` makes, or None if it fails.

    A failure is one warning, because what the picture shows is saved elsewhere. What matplotlib
    warns of, such as letters that its font lacks, is one warning, too.
    """
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            picture = draw()
    except Exception as error:
        warn_once(f"{name} was not drawn: {error}")
        return None
    if caught:
        warn_once(f"{name}: {caught[0].message}")
    return picture


def format_count(x: float, _: float) -> str:
    """Format a token count: 500 k, 3 M, 1.5 B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:g} {unit}"
    return f"{x:g}"
