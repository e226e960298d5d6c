"""Helpers for all plots, which share one style."""

import io
import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from common.console import warn_once

matplotlib.style.use(Path(__file__).with_name("style.mplstyle"))


def png(figure: Figure) -> bytes:
    """Return the figure as the content of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def drawn(name: str, draw: Callable[[], bytes]) -> bytes | None:
    """Return the picture that `draw` makes, or None if it fails: what it shows is saved elsewhere.

    A failure, or what matplotlib warns of, such as letters that its font lacks, is one warning.
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


def log_scale(axes: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers at its ticks."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def short_count(x: float, _: float) -> str:
    """Format a token count: 500 k, 3 M, 1.5 B."""
    size, unit = next(
        ((size, unit) for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")) if x >= size),
        (1, ""),
    )
    return f"{x / size:g}{unit}"
