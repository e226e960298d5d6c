"""The pictures of a report, as PNGs, and the colours that pictures and page share."""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, to_hex
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from common.figures import log_scale, png, short_count
from tools.report.records import Point, Record, brief, labels, lowest_loss, shown, varying_settings

_DASHES = ((), (6, 2), (1, 2), (6, 2, 1, 2))
"""Line styles, one for every round through the colours: lengths of lines and gaps, for pictures and page."""
_COLOURS = 7  # of the style's, without its grey
_MOST_NAMED = _COLOURS * len(_DASHES)  # in a legend; more runs are coloured by their loss
_PANELS_IN_A_ROW = 6
_HIGHEST = 1e100  # matplotlib's margins overflow above
_MOST_PANELS = 24
_MOST_TICKS = 8  # of a panel
_X_AXES = {"tokens": "tokens", "flops": "training FLOPs", "seconds": "training time ({unit})"}
_UNITS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}
_LOSS = "lowest validation loss (nats per token)"
_GREY = "#8a8f98"


def shades(records: Sequence[Record]) -> list[str]:
    """A colour for each run by the rank of its loss: dark blue for the lowest, yellow for the highest."""
    found = [record.figures["best"] for record in records]
    bests = sorted({best for best in found if best is not None})
    return [_GREY if best is None else _shade(bests.index(best) / max(1, len(bests) - 1)) for best in found]


def _shade(share: float) -> str:
    return to_hex(matplotlib.colormaps["cividis"](0.1 + 0.85 * share))


def styles(records: Sequence[Record]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the colour of each run, and its lengths of lines and gaps: none for a whole line.

    Many runs, which these could not make distinct, have their shades.
    """
    if len(records) > _MOST_NAMED:
        return [(shade, ()) for shade in shades(records)]
    cycle = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    return [(to_hex(cycle[i % _COLOURS]), _DASHES[i // _COLOURS]) for i in range(len(records))]


def draw_curves(records: Sequence[Record], title: str) -> bytes:
    """Draw validation loss over tokens, FLOPs and time, for each that every run knows; and what led to it, as a PNG."""
    points = [point for record in records for point in record.curves["val_loss"]]
    known = [key for key in _X_AXES if points and all(point[key] is not None for point in points)] or ["tokens"]
    heights = [5.0, 2.6] + [0.3 + 0.21 * len(records)] * (len(records) <= _MOST_NAMED)
    figure = Figure(figsize=(max(9.0, 4.6 * len(known)), sum(heights)))
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    upper, lower, *legend = parts
    panels = upper.subplots(1, len(known), sharey=True, squeeze=False)[0]
    unit = _unit(records)
    for axes, key in zip(panels, known, strict=True):
        _draw(axes, records, "val_loss", key, _UNITS[unit] if key == "seconds" else 1.0)
        axes.set_xlabel(_X_AXES[key].format(unit=unit))
    panels[0].set_ylabel("validation loss (nats per token)")
    names = {"loss": "training loss (nats per token)", "lr": "learning rate", "grad_norm": "gradient norm"}
    for axes, (curve, name) in zip(lower.subplots(1, len(names)), names.items(), strict=True):
        _draw(axes, records, curve, "tokens", 1.0)
        axes.set(xlabel="tokens", ylabel=name)
    handles, texts = panels[0].get_legend_handles_labels()
    for below in legend:
        below.legend(handles[::-1], texts[::-1], loc="upper left")
    if not legend:
        _colour_bar(upper, panels, records)
    figure.suptitle(finding(records, title), wrap=True)
    return png(figure)


def finding(records: Sequence[Record], title: str) -> str:
    """Return a title that says the lowest loss."""
    best = lowest_loss(records)
    return title if best is None else f"lowest validation loss {best}: {title}"


def _draw(axes: Axes, records: Sequence[Record], curve: str, x: str, size: float) -> None:
    """Draw a curve of every run; of seeds, each as a thin line and their mean as a thick one."""
    runs = list(zip(records, labels(records), styles(records), strict=True))
    for record, name, (colour, dash) in reversed(runs):
        style: dict[str, Any] = {"color": colour, "linestyle": (0, dash) if dash else "-"}
        for member in record.members:
            _plot(axes, member.curves[curve], x, size, **style | {"linewidth": 0.7, "alpha": 0.6})
        if not record.members and (parts := [point for point in record.curves[curve] if "low" in point]):
            lows, highs = ([min(part[end], _HIGHEST) for part in parts] for end in ("low", "high"))
            axes.fill_between([part[x] / size for part in parts], lows, highs, color=colour, alpha=0.2, linewidth=0)
        label = "\u200b" + name  # matplotlib hides labels that begin with _
        _plot(axes, record.curves[curve], x, size, **style, label=label)
    every = [one for record in records for one in (record, *record.members)]
    values = [point["value"] for run in every for point in run.curves[curve] if point["value"] > 0]
    if values and max(values) > 10 * min(values):
        log_scale(axes)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    if x == "tokens":
        axes.xaxis.set_major_formatter(short_count)


def _plot(axes: Axes, points: Sequence[Point], x: str, size: float, **style: Any) -> None:
    marker = "o" if len(points) <= 60 and "low" not in (points[0] if points else ()) else ""
    known = [point for point in points if point[x] is not None]
    axes.plot(
        [p[x] / size for p in known], [min(p["value"], _HIGHEST) for p in known], marker=marker, markersize=3, **style
    )


def _unit(records: Sequence[Record]) -> str:
    """Return the largest unit of time such that the longest run took at least two of it."""
    most = max(record.figures["seconds"] or 0.0 for record in records)
    return next((name for name, seconds in reversed(_UNITS.items()) if most >= 2 * seconds), "seconds")


def _colour_bar(figure: SubFigure, panels: Any, records: Sequence[Record]) -> None:
    colour_map = ListedColormap([_shade(i / 99) for i in range(100)])
    bar = figure.colorbar(ScalarMappable(Normalize(0, 1), colour_map), ax=list(panels), ticks=[0, 1])
    bests = sorted(best for record in records if (best := record.figures["best"]) is not None)
    bar.ax.set_yticklabels([f"{best:.4f}" for best in (bests[0], bests[-1])] if bests else ["", ""])
    bar.set_label(f"{_LOSS}, by rank")


def draw_settings(records: Sequence[Record], title: str) -> bytes | None:
    """Draw every run's loss over each setting in which the runs differ, a panel for each; None if none varies."""
    every = [key for key in varying_settings(records) if key != "seed" or all(not r.members for r in records)]
    evaluated = [record for record in records if record.figures["best"] is not None]
    if not every or not evaluated:
        return None
    keys = every[:_MOST_PANELS]
    rows, columns = math.ceil(len(keys) / _PANELS_IN_A_ROW), min(len(keys), _PANELS_IN_A_ROW)
    figure = Figure(figsize=(max(7.0, 2.4 * columns + 1.2), 4.5 * rows + 0.5))
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(keys) :]:
        axes.set_visible(False)
    panels = list(grid.flat[: len(keys)])
    for axes, key in zip(panels, keys, strict=True):
        values: list[Any] = [shown(record.settings.get(key)) for record in evaluated]
        ranks = sorted(set(values), key=lambda value: (isinstance(value, str), value))  # numbers, then texts
        places = [ranks.index(value) for value in values]
        ends = [(record.figures["low"], record.figures["high"]) for record in evaluated]
        axes.vlines(places, *zip(*ends, strict=True), color=shades(evaluated), alpha=0.6)
        axes.scatter(places, [record.figures["best"] for record in evaluated], color=shades(evaluated))
        ticks = range(0, len(ranks), math.ceil(len(ranks) / _MOST_TICKS))
        axes.set_xticks(ticks, [_cut(brief(ranks[tick]), 20) for tick in ticks], rotation=90)
        axes.set_xlabel(_cut(key.replace(".", ".\n"), 48))
        axes.margins(x=0.15)
    for axes in grid[:, 0]:
        axes.set_ylabel(_LOSS)
    more = f" ({len(every) - len(keys)} more settings vary)" if len(every) > len(keys) else ""
    figure.suptitle(finding(records, title) + more, wrap=True)
    return png(figure)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
