"""The pictures of a report, as PNGs, and the colours that pictures and page share.

Names and settings are drawn as they are: no dollar sign begins a formula.
"""

import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator

from common.figures import short_count
from tools.report.records import Point, Record, labels, shown, varying_settings

_MOST_NAMED = 10
"""Runs that have colours of their own, and names in a legend; more are coloured by their loss."""
_MOST_AXES = 7
_MOST_VALUES = 8  # each of which has a tick
_MOST_CELLS = 12
"""Rows or columns of a heat map: a search gives a setting as many values as there are runs."""
_X_AXES = {"tokens": "tokens", "flops": "training FLOPs", "seconds": "training time ({unit})"}
_UNITS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}
_LOSS = "lowest validation loss (nats per token)"
_GREY = "#8a8f98"
_HALO = [withStroke(linewidth=3, foreground="white")]


def shades(records: Sequence[Record]) -> list[str]:
    """A colour for each run by the rank of its loss: blue for the lowest, yellow for the highest."""
    bests = sorted({best for record in records if (best := record.figures["best"]) is not None})
    ranks = {best: rank / max(1, len(bests) - 1) for rank, best in enumerate(bests)}
    found = (record.figures["best"] for record in records)
    return [_GREY if best is None else _shade(ranks[best]) for best in found]


def _shade(share: float) -> str:
    return to_hex(matplotlib.colormaps["viridis"](0.22 + 0.7 * share))


def colours(records: Sequence[Record]) -> list[str]:
    """A colour for each run: distinct ones, or, for many runs, its shade."""
    distinct = [to_hex(colour) for colour in matplotlib.colormaps["tab10"].colors]  # type: ignore[attr-defined]
    return distinct[: len(records)] if len(records) <= _MOST_NAMED else shades(records)


def draw_curves(records: Sequence[Record], title: str) -> bytes:
    """Validation loss over tokens, FLOPs and time, side by side, as far as they are known of all runs; a PNG."""
    known = [key for key in _X_AXES if _all_know(records, key)]
    with matplotlib.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(5.2 * max(1, len(known)) + 0.6, 5.2), layout="constrained")
        panels = figure.subplots(1, max(1, len(known)), sharey=True, squeeze=False)[0]
        names = labels(records, varying_settings(records))
        unit = _unit(records)
        for axes, key in zip(panels, known or ["tokens"], strict=True):
            for record, colour, name in reversed(list(zip(records, colours(records), names, strict=True))):
                xs, ys = _curve(record.val, key, _UNITS[unit] if key == "seconds" else 1.0)
                axes.plot(
                    xs, ys, color=colour, marker="o", markersize=3, linewidth=1.5, label="\u200b" + _cut(name, 60)
                )
            axes.set_xlabel(_X_AXES[key].format(unit=unit))
            axes.xaxis.set_major_locator(MaxNLocator(6))
            axes.grid(alpha=0.3)
            if key == "tokens":
                axes.xaxis.set_major_formatter(short_count)
        panels[0].set_ylabel("validation loss (nats per token)")
        if limits := _limits(records):
            panels[0].set_ylim(*limits)
        if len(records) <= _MOST_NAMED:
            handles, texts = panels[0].get_legend_handles_labels()
            figure.legend(handles[::-1], texts[::-1], loc="outside lower center", ncols=1 if len(records) < 3 else 2)
        else:
            _colour_bar(figure, panels, records)
        figure.suptitle(_cut(title, 90))
        return _png(figure)


def _all_know(records: Sequence[Record], key: str) -> bool:
    """Whether an axis has a place for every point, and there are some."""
    found = [point[key] for record in records for point in record.val]
    return bool(found) and None not in found


def _unit(records: Sequence[Record]) -> str:
    """The largest unit of time of which some run took two."""
    most = max(record.figures["seconds"] or 0.0 for record in records)
    return next((name for name, seconds in reversed(_UNITS.items()) if most >= 2 * seconds), "seconds")


def _curve(points: Sequence[Point], key: str, unit: float) -> tuple[list[float], list[float]]:
    pairs = [(x / unit, y) for p in points if (x := p[key]) is not None and (y := p["val_loss"]) is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _limits(records: Sequence[Record]) -> tuple[float, float] | None:
    """The range of the losses without the first fall and the runs that went astray, which would flatten the rest."""
    losses = sorted(
        loss
        for record in records
        for point in (record.val[1:] if len(record.val) > 4 else record.val)
        if (loss := point["val_loss"]) is not None
    )
    if not losses:
        return None
    low, middle = losses[0], losses[len(losses) // 2]
    high = min(losses[-1], middle + 6 * (middle - low)) if middle > low else losses[-1]
    margin = 0.06 * (high - low) or 0.05
    return low - margin, high + margin


def draw_settings(records: Sequence[Record], title: str) -> bytes | None:
    """Loss by the settings that vary: a heat map of two with few values, else parallel axes; None if none varies."""
    every = varying_settings(records)
    keys = every[:_MOST_AXES]
    evaluated = [record for record in records if record.figures["best"] is not None]
    if not keys or not evaluated:
        return None
    with matplotlib.rc_context({"text.parse_math": False}):
        grid = len(keys) == 2 and all(len(_values(evaluated, key)) <= _MOST_CELLS for key in keys)
        figure = _heat_map(evaluated, keys[0], keys[1]) if grid else _parallel(evaluated, keys)
        more = f" ({len(every) - len(keys)} more settings vary)" if len(every) > len(keys) else ""
        figure.suptitle(_cut(title, 90) + more)
        return _png(figure)


def _heat_map(records: Sequence[Record], row: str, column: str) -> Figure:
    rows, columns = (_values(records, key) for key in (row, column))
    cells = [[math.nan] * len(columns) for _ in rows]
    for record in reversed(records):  # the best last, and so seen
        place = rows.index(shown(record.settings.get(row))), columns.index(shown(record.settings.get(column)))
        cells[place[0]][place[1]] = record.figures["best"] or 0.0
    known = [loss for line in cells for loss in line if not math.isnan(loss)]
    low, high = min(known), max(known)
    figure = Figure(figsize=(3.2 + 1.1 * len(columns), 2.2 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(cells, cmap="viridis", aspect="auto")
    for i, line in enumerate(cells):
        for j, loss in enumerate(line):
            colour = "black" if _share(loss, low, high) > 0.6 else "white"
            if not math.isnan(loss):
                axes.text(j, i, f"{loss:.4f}", ha="center", va="center", color=colour, fontsize=9)
    axes.set_xticks(range(len(columns)), [_tick(value) for value in columns])
    axes.set_yticks(range(len(rows)), [_tick(value) for value in rows])
    axes.set_xlabel(_cut(column, 60))
    axes.set_ylabel(_cut(row, 60))
    figure.colorbar(image, ax=axes, label=_LOSS)
    return figure


def _parallel(records: Sequence[Record], keys: Sequence[str]) -> Figure:
    figure = Figure(figsize=(2.4 * (len(keys) + 1) + 1.2, 5), layout="constrained")
    axes = figure.subplots()
    heights = [_axis(axes, i, records, key) for i, key in enumerate(keys)]
    bests = [record.figures["best"] or 0.0 for record in records]
    heights.append([_share(best, min(bests), max(bests)) for best in bests])
    for line, colour in reversed(list(zip(zip(*heights, strict=True), shades(records), strict=True))):
        axes.plot(range(len(line)), line, color=colour, linewidth=1.6)
    ticks = _round_numbers(min(bests), max(bests), log=False)
    _ticks(axes, len(keys), {_tick(tick): _share(tick, min(bests), max(bests)) for tick in ticks}, right=True)
    names = [_cut(key.replace(".", ".\n"), 48) for key in keys]
    axes.set_xticks(range(len(keys) + 1), [*names, "lowest validation loss\n(nats per token)"])
    axes.set_xlim(-0.6, len(keys) + 0.5)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _axis(axes: Axes, x: int, records: Sequence[Record], key: str) -> list[float]:
    """Draw a setting's axis; returns the height of each run on it, 0 to 1."""
    values = _values(records, key)
    few = len(values) <= _MOST_VALUES
    numbers = [value for value in values if isinstance(value, float)]
    ticks: Sequence[float | str] = values
    places: dict[float | str, float]
    if len(numbers) == len(values) > 1:
        low, high = numbers[0], numbers[-1]
        log = low > 0 and high / low >= 10
        rounded = numbers if few else _round_numbers(low, high, log)
        scale = math.log10 if log else float
        places = {value: _share(scale(value), scale(low), scale(high)) for value in (*numbers, *rounded)}
        ticks = rounded
    else:
        places = {value: i / max(1, len(values) - 1) for i, value in enumerate(values)}
    _ticks(axes, x, {_tick(value): places[value] for value in ticks}, right=False)
    spread = 0.04 if few else 0.0  # runs of one value would hide each other
    offsets = [spread * (0.5 - i / max(1, len(records) - 1)) for i in range(len(records))]
    found = [places[shown(record.settings.get(key))] for record in records]
    return [place + offset for place, offset in zip(found, offsets, strict=True)]


def _round_numbers(low: float, high: float, log: bool) -> list[float]:
    """Where an axis of many values has its ticks; at its ends, if no two round numbers are between them."""
    locator = LogLocator(subs=(1.0, 2.0, 5.0)) if log else MaxNLocator(6)
    ticks = [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]
    return ticks if len(ticks) > 1 else [low, high]


def _ticks(axes: Axes, x: int, places: dict[str, float], right: bool) -> None:
    """An axis with its values, as far as there is room for them."""
    axes.plot([x, x], [0, 1], color="#444a52", linewidth=1)
    before = -1.0
    for text, place in sorted(places.items(), key=lambda item: item[1]):
        if place - before >= 0.045:
            before = place
            axes.plot([x - 0.012, x + 0.012], [place, place], color="#444a52", linewidth=1)
            height = place + 0.03 * (x > 0 and not right)  # above the runs' lines, which come from the left
            side = "left" if right else "right"
            shift = 0.04 if right else -0.04
            axes.text(x + shift, height, text, ha=side, va="center", fontsize=9, zorder=5, path_effects=_HALO)


def _values(records: Sequence[Record], key: str) -> list[float | str]:
    values = {shown(record.settings.get(key)) for record in records}
    return sorted(
        values, key=lambda value: (isinstance(value, str), value if isinstance(value, float) else 0, str(value))
    )


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _tick(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else _cut(value, 20)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _colour_bar(figure: Figure, panels: Any, records: Sequence[Record]) -> None:
    colour_map = matplotlib.colors.ListedColormap([_shade(i / 99) for i in range(100)])
    bar = figure.colorbar(ScalarMappable(Normalize(0, 1), colour_map), ax=list(panels), ticks=[0, 1])
    bests = [best for record in records if (best := record.figures["best"]) is not None]
    bar.ax.set_yticklabels([f"{bests[0]:.4f}", f"{bests[-1]:.4f}"] if bests else ["", ""])
    bar.set_label(f"{_LOSS}, by rank")


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
