"""The page of a report: a template with the runs in it as JSON. It loads nothing, and opens without a network.

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

from tools.report.pictures import shades, styles
from tools.report.records import Point, Record, in_bits, labels, printable, shown, varying_settings

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
                "members": [{"name": member.name, "curves": _columns(member)} for member in record.members],
            }
            for record, label, (colour, dash), shade in runs
        ],
    }
    script, style = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    page = (_HERE / "page.html").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh:g}">'
    parts = {"REFRESH": again, "STYLE": style, "SCRIPT": script, "SCRIPT_SHA256": digest, "DATA": _json(data)}
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], page)  # one pass: what parts contain stays


def _json(data: dict[str, Any]) -> str:
    """Return JSON that cannot end the HTML element that contains it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _columns(record: Record) -> dict[str, dict[str, list[float | None]]]:
    return {name: _column(points) for name, points in record.curves.items() if points and name in CURVES}


def _column(points: Sequence[Point]) -> dict[str, list[float | None]]:
    return {key: [_rounded(point[key]) for point in points] for key in points[0]}


def _rounded(value: float | None) -> float | None:
    """Keep six digits: more than a screen can show, and half the size."""
    return None if value is None else float(f"{value:.6g}")
