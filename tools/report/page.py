"""A report's picture, and its page: a template with the runs in it as JSON. It loads nothing, and needs no network.

Names and settings are not trusted: they are data in the page, and its script writes them only as text. The page's
content security policy blocks every other script and every request.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from common.figures import log_scale, png, short_count
from common.settings import JsonDict
from tools.report.records import (
    Point,
    Record,
    in_bits,
    labels,
    lowest_loss,
    printable,
    shown,
    varying_settings,
)

_HERE = Path(__file__).parent
CURVES = ("val_loss", "val_bits_per_byte", "loss", "lr", "grad_norm")


def page_of(records: Sequence[Record], title: str, refresh: float | None = None) -> str:
    """Return the report as one HTML file. `refresh`: seconds after which a browser loads it again."""
    keys = varying_settings(records)
    runs = zip(records, labels(records), styles(records), shades(records), strict=True)
    data = {
        "title": printable(title),
        "made": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        "refresh": refresh,
        "keys": keys,
        "in_bits": in_bits(records),
        "runs": [
            {
                "name": record.name,
                "failure": record.failure,
                "label": label,
                "colour": colour,
                "dash": " ".join(map(str, dash)),
                "shade": shade,
                "settings": {key: shown(record.settings.get(key)) for key in keys},
                "figures": {key: _rounded(value) for key, value in record.figures.items()},
                "curves": _columns(record),
                "members": [
                    {"name": member.name, "curves": _columns(member)} for member in record.members
                ],
            }
            for record, label, (colour, dash), shade in runs
        ],
    }
    script, style = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    page = (_HERE / "page.html").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh:g}">'
    parts = {
        "REFRESH": again,
        "STYLE": style,
        "SCRIPT": script,
        "SCRIPT_SHA256": digest,
        "DATA": _json(data),
    }
    return re.sub(
        r"\{\{(\w+)\}\}", lambda name: parts[name[1]], page
    )  # one pass: what parts contain stays


def _json(data: JsonDict) -> str:
    """Return JSON that cannot end the HTML element that contains it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _columns(record: Record) -> dict[str, dict[str, list[float | None]]]:
    return {
        name: _column(points) for name, points in record.curves.items() if points and name in CURVES
    }


def _column(points: Sequence[Point]) -> dict[str, list[float | None]]:
    return {key: [_rounded(point[key]) for point in points] for key in points[0]}


def _rounded(value: float | None) -> float | None:
    """Keep six digits: more than a screen can show, and half the size."""
    return None if value is None else float(f"{value:.6g}")


_DASHES = ((), (6, 2), (1, 2), (6, 2, 1, 2))
"""Line styles, one for every round through the colours: lengths of lines and gaps, for picture and page."""
_COLOURS = 7  # of the style's, without its grey
_MOST_NAMED = _COLOURS * len(_DASHES)  # in a legend; more runs are coloured by their loss
_LEGEND = 120  # letters that fit beside each other
_HIGHEST = 1e100  # matplotlib's margins overflow above
_IN_NATS = {"val_loss": "validation loss (nats per token)"}
_IN_BITS = {"val_bits_per_byte": "validation loss (bits per byte)"}
_PANELS = {
    "loss": "training loss (nats per token)",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
}
_GREY = "#8a8f98"


def shades(records: Sequence[Record]) -> list[str]:
    """A colour for each run by the rank of its loss: dark blue for the lowest, yellow for the highest."""
    found = [record.figures["best"] for record in records]
    bests = sorted({best for best in found if best is not None})
    share = {best: rank / max(1, len(bests) - 1) for rank, best in enumerate(bests)}
    colours = matplotlib.colormaps["cividis"]
    return [_GREY if best is None else to_hex(colours(0.1 + 0.85 * share[best])) for best in found]


def styles(records: Sequence[Record]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the colour of each run, and its lengths of lines and gaps: none for a whole line.

    Many runs, which these could not make distinct, have their shades.
    """
    if len(records) > _MOST_NAMED:
        return [(shade, ()) for shade in shades(records)]
    cycle = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    return [(to_hex(cycle[i % _COLOURS]), _DASHES[i // _COLOURS]) for i in range(len(records))]


def draw_curves(records: Sequence[Record], title: str) -> bytes:
    """Draw validation loss, and what led to it, over tokens, as a PNG."""
    columns = max(1, min(4, _LEGEND // max(map(len, labels(records)))))
    legend = 0.3 + 0.21 * -(-len(records) // columns) if len(records) <= _MOST_NAMED else 0.0
    figure = Figure(figsize=(11.0, 7.0 + legend))
    panels = figure.subplots(2, 2)
    first = _IN_BITS if in_bits(records) else _IN_NATS
    for axes, (curve, name) in zip(panels.flat, (first | _PANELS).items(), strict=True):
        _draw(axes, records, curve)
        axes.set(xlabel="tokens", ylabel=name)
        axes.xaxis.set_major_formatter(short_count)
    if legend:
        handles, texts = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles[::-1], texts[::-1], loc="outside lower left", ncols=columns)
    best = lowest_loss(records)
    figure.suptitle(title if best is None else f"lowest validation loss {best}: {title}", wrap=True)
    return png(figure)


def _draw(axes: Axes, records: Sequence[Record], curve: str) -> None:
    """Draw a curve of every run, the best on top; of seeds, each as a thin line and their mean as a thick one."""
    runs = list(zip(records, labels(records), styles(records), strict=True))
    for record, name, (colour, dash) in reversed(runs):
        style: dict[str, Any] = {"color": colour, "linestyle": (0, dash) if dash else "-"}
        for member in record.members:
            _plot(axes, member.curves[curve], **style | {"linewidth": 0.7, "alpha": 0.6})
        _plot(
            axes, record.curves[curve], **style, label="\u200b" + name
        )  # matplotlib hides labels that begin with _
    values = [
        value
        for record in records
        for point in record.curves[curve]
        if (value := point["value"]) > 0
    ]
    if values and max(values) > 10 * min(values):
        log_scale(axes)


def _plot(axes: Axes, points: Sequence[Point], **style: Any) -> None:
    marker = "o" if len(points) <= 20 else ""
    tokens, values = (
        [min(point[key], _HIGHEST) for point in points] for key in ("tokens", "value")
    )
    axes.plot(tokens, values, marker=marker, markersize=3, **style)
