"""The pictures of a report, as PNGs, and the colours that pictures and page share.

Names and settings are drawn literally: a dollar sign does not begin a formula.
"""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from common.figures import png, short_count
from tools.report.records import Record, brief, labels, shown, varying_settings

_MOST_NAMED = 10
"""Runs with colours of their own and names in a legend; more than these are coloured by their loss."""
_MOST_PANELS = 7
_MOST_TICKS = 8  # of a panel
_X_AXES = {"tokens": "tokens", "flops": "training FLOPs", "seconds": "training time ({unit})"}
_UNITS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}
_LOSS = "lowest validation loss (nats per token)"
_GREY = "#8a8f98"


def shades(records: Sequence[Record]) -> list[str]:
    """A colour for each run by the rank of its loss: blue for the lowest, yellow for the highest."""
    found = [record.figures["best"] for record in records]
    bests = sorted({best for best in found if best is not None})
    return [_GREY if best is None else _shade(bests.index(best) / max(1, len(bests) - 1)) for best in found]


def _shade(share: float) -> str:
    return to_hex(matplotlib.colormaps["viridis"](0.22 + 0.7 * share))


def colours(records: Sequence[Record]) -> list[str]:
    """Return distinct colours for the runs, or their shades if there are many."""
    distinct = [to_hex(colour) for colour in matplotlib.colormaps["tab10"].colors]  # type: ignore[attr-defined]
    return distinct[: len(records)] if len(records) <= _MOST_NAMED else shades(records)


def draw_curves(records: Sequence[Record], title: str) -> bytes:
    """Draw validation loss over tokens, FLOPs and time, for each of these that every run knows; a PNG."""
    points = [point for record in records for point in record.val]
    known = [key for key in _X_AXES if points and all(point[key] is not None for point in points)] or ["tokens"]
    with matplotlib.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(5.2 * len(known) + 0.6, 5.2), layout="constrained")
        panels = figure.subplots(1, len(known), sharey=True, squeeze=False)[0]
        names = labels(records, varying_settings(records))
        unit = _unit(records)
        for axes, key in zip(panels, known, strict=True):
            size = _UNITS[unit] if key == "seconds" else 1.0
            for record, colour, name in reversed(list(zip(records, colours(records), names, strict=True))):
                xs, losses = [point[key] / size for point in record.val], [point["val_loss"] for point in record.val]
                label = "\u200b" + _cut(name, 60)  # matplotlib hides labels that begin with _
                axes.plot(xs, losses, color=colour, marker="o", markersize=3, linewidth=1.5, label=label)
            axes.set_xlabel(_X_AXES[key].format(unit=unit))
            axes.xaxis.set_major_locator(MaxNLocator(6))
            axes.grid(alpha=0.3)
            if key == "tokens":
                axes.xaxis.set_major_formatter(short_count)
        panels[0].set_ylabel("validation loss (nats per token)")
        if points:
            panels[0].set_ylim(*_limits(records))
        if len(records) <= _MOST_NAMED:
            handles, texts = panels[0].get_legend_handles_labels()
            figure.legend(handles[::-1], texts[::-1], loc="outside lower center", ncols=1 if len(records) < 3 else 2)
        else:
            _colour_bar(figure, panels, records)
        figure.suptitle(_cut(title, 90))
        return png(figure)


def _unit(records: Sequence[Record]) -> str:
    """Return the largest unit of time such that the longest run took at least two of it."""
    most = max(record.figures["seconds"] or 0.0 for record in records)
    return next((name for name, seconds in reversed(_UNITS.items()) if most >= 2 * seconds), "seconds")


def _limits(records: Sequence[Record]) -> tuple[float, float]:
    """Return the range of the losses without the first fall and diverged runs, which would flatten the rest."""
    shown_points = [point for record in records for point in record.val[len(record.val) > 4 :]]
    losses = sorted(point["val_loss"] for point in shown_points)
    low, middle = losses[0], losses[len(losses) // 2]
    high = min(losses[-1], middle + 6 * (middle - low)) if middle > low else losses[-1]
    margin = 0.06 * (high - low) or 0.05
    return low - margin, high + margin


def _colour_bar(figure: Figure, panels: Any, records: Sequence[Record]) -> None:
    colour_map = ListedColormap([_shade(i / 99) for i in range(100)])
    bar = figure.colorbar(ScalarMappable(Normalize(0, 1), colour_map), ax=list(panels), ticks=[0, 1])
    bests = [f"{best:.4f}" for record in records if (best := record.figures["best"]) is not None] or [""]
    bar.ax.set_yticklabels([bests[0], bests[-1]])
    bar.set_label(f"{_LOSS}, by rank")


def draw_settings(records: Sequence[Record], title: str) -> bytes | None:
    """Draw every run's loss over each setting in which the runs differ, a panel for each; None if none varies."""
    every = varying_settings(records)
    evaluated = [record for record in records if record.figures["best"] is not None]
    if not every or not evaluated:
        return None
    keys = every[:_MOST_PANELS]
    with matplotlib.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(2.4 * len(keys) + 1.2, 5), layout="constrained")
        panels = figure.subplots(1, len(keys), sharey=True, squeeze=False)[0]
        for axes, key in zip(panels, keys, strict=True):
            values: list[Any] = [shown(record.settings.get(key)) for record in evaluated]
            ranks = sorted(set(values), key=lambda value: (isinstance(value, str), value))  # numbers, then texts
            places = [ranks.index(value) for value in values]
            axes.scatter(places, [record.figures["best"] for record in evaluated], color=shades(evaluated))
            ticks = range(0, len(ranks), math.ceil(len(ranks) / _MOST_TICKS))
            axes.set_xticks(ticks, [_cut(brief(ranks[tick]), 20) for tick in ticks], rotation=90)
            axes.set_xlabel(_cut(key.replace(".", ".\n"), 48))
            axes.margins(x=0.15)
            axes.grid(alpha=0.3)
        panels[0].set_ylabel(_LOSS)
        more = f" ({len(every) - len(keys)} more settings vary)" if len(every) > len(keys) else ""
        figure.suptitle(_cut(title, 90) + more)
        return png(figure)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
