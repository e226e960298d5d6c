"""Helpers for all plots."""

import io

from matplotlib.figure import Figure


def png(figure: Figure) -> bytes:
    """Return the figure as the content of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def short_count(x: float, _: float) -> str:
    """Format a token count: 500 k, 3 M, 1.5 B."""
    size, unit = next(((size, unit) for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")) if x >= size), (1, ""))
    return f"{x / size:g}{unit}"
