"""The pictures of a report, as PNGs, and the colours that pictures and page share.

Names and settings are drawn literally: a dollar sign does not begin a formula.
"""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from common.figures import png, short_count
from tools.report.records import Record, brief, labels, shown, varying_settings

_MOST_NAMED = 10
"""Runs with colours of their own and names in a legend; more than these are coloured by their loss."""
_MOST_AXES = 7
_MOST_TICKS = 8  # of an axis
_MOST_CELLS = 12
"""Rows or columns of a heat map: a search gives a setting as many values as there are runs."""
_X_AXES = {"tokens": "tokens", "flops": "training FLOPs", "seconds": "training time ({unit})"}
_UNITS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}
_LOSS = "lowest validation loss (nats per token)"
_GREY, _DARK = "#8a8f98", "#444a52"
_HALO = [withStroke(linewidth=3, foreground="white")]

Values = dict[str, list[Any]]
"""Maps each setting to its values, sorted."""


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
    """Draw loss by the varying settings: a heat map of two with few values, else parallel axes; None if none varies."""
    every = varying_settings(records)
    evaluated = [record for record in records if record.figures["best"] is not None]
    if not every or not evaluated:
        return None
    values = {key: _values(evaluated, key) for key in every[:_MOST_AXES]}
    grid = len(values) == 2 and all(len(found) <= _MOST_CELLS for found in values.values())
    with matplotlib.rc_context({"text.parse_math": False}):
        figure = _heat_map(evaluated, values) if grid else _parallel(evaluated, values)
        more = f" ({len(every) - len(values)} more settings vary)" if len(every) > len(values) else ""
        figure.suptitle(_cut(title, 90) + more)
        return png(figure)


def _values(records: Sequence[Record], key: str) -> list[Any]:
    """Return a setting's values in order: numbers, then texts."""
    values: set[Any] = {shown(record.settings.get(key)) for record in records}
    return sorted(values, key=lambda value: (isinstance(value, str), value))


def _heat_map(records: Sequence[Record], values: Values) -> Figure:
    (row, rows), (column, columns) = values.items()
    cells: dict[Any, float] = {}
    for record in records:  # the best come first
        place = shown(record.settings.get(row)), shown(record.settings.get(column))
        cells.setdefault(place, record.figures["best"])
    figure = Figure(figsize=(3.2 + 1.1 * len(columns), 2.2 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()
    scale = Normalize(min(cells.values()), max(cells.values()))
    losses = [[cells.get((y, x), math.nan) for x in columns] for y in rows]
    image = axes.imshow(losses, cmap="viridis", norm=scale, aspect="auto")
    for (y, x), loss in cells.items():
        colour = "black" if scale(loss) > 0.6 else "white"
        axes.text(columns.index(x), rows.index(y), f"{loss:.4f}", ha="center", va="center", color=colour, fontsize=9)
    axes.set_xticks(range(len(columns)), list(map(_tick, columns)))
    axes.set_yticks(range(len(rows)), list(map(_tick, rows)))
    axes.set_xlabel(_cut(column, 60))
    axes.set_ylabel(_cut(row, 60))
    figure.colorbar(image, ax=axes, label=_LOSS)
    return figure


def _parallel(records: Sequence[Record], values: Values) -> Figure:
    """Draw a line for every run through its settings, each at its value's rank, to its loss."""
    figure = Figure(figsize=(2.4 * (len(values) + 1) + 1.2, 5), layout="constrained")
    axes = figure.subplots()
    for x, found in enumerate(values.values()):
        _axis(axes, x, {_tick(value): _share(i, len(found) - 1) for i, value in enumerate(found)}, right=False)
    bests = [record.figures["best"] for record in records]
    low, span = min(bests), max(bests) - min(bests)
    _axis(axes, len(values), {f"{low + span * i / 5:.6g}": _share(span * i / 5, span) for i in range(6)}, right=True)
    for i, (record, colour) in reversed(list(enumerate(zip(records, shades(records), strict=True)))):
        shift = 0.04 * (0.5 - _share(i, len(records) - 1))  # runs of one value would hide each other
        places = [found.index(shown(record.settings.get(key))) for key, found in values.items()]
        line = [_share(at, len(found) - 1) + shift for at, found in zip(places, values.values(), strict=True)]
        axes.plot([*line, _share(bests[i] - low, span)], color=colour, linewidth=1.6)
    names = [_cut(key.replace(".", ".\n"), 48) for key in values]
    axes.set_xticks(range(len(values) + 1), [*names, "lowest validation loss\n(nats per token)"])
    axes.set_xlim(-0.6, len(values) + 0.5)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _axis(axes: Axes, x: int, places: dict[str, float], right: bool) -> None:
    """Draw an axis with its values, or every n-th of many."""
    axes.plot([x, x], [0, 1], color=_DARK, linewidth=1)
    side, shift = ("left", 0.04) if right else ("right", -0.04)
    for text, place in list(places.items())[:: math.ceil(len(places) / _MOST_TICKS)]:
        axes.plot([x - 0.012, x + 0.012], [place, place], color=_DARK, linewidth=1)
        height = place + 0.03 * (x > 0 and not right)  # above the runs' lines, which come from the left
        axes.text(x + shift, height, text, ha=side, va="center", fontsize=9, zorder=5, path_effects=_HALO)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.5


def _tick(value: float | str) -> str:
    return _cut(brief(value), 20)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
