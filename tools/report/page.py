"""The page of a report: a template with the runs in it as JSON. It loads nothing, and opens without a network.

Names and settings are not trusted: they are data in the page, and its script only writes them as text. The page's
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

from tools.report.pictures import colours, shades
from tools.report.records import MOST_SETTINGS, Point, Record, labels, printable, shown, varying_settings

_HERE = Path(__file__).parent


def page_of(records: Sequence[Record], title: str) -> str:
    """Return the report as one HTML file."""
    varying = varying_settings(records)
    keys = varying[:MOST_SETTINGS]
    runs = zip(records, labels(records, keys), colours(records), shades(records), strict=True)
    data = {
        "title": printable(title),
        "made": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "keys": keys,
        "omitted": len(varying) - len(keys),
        "runs": [
            {
                "name": record.name,
                "label": label,
                "colour": colour,
                "shade": shade,
                "settings": {key: shown(record.settings.get(key)) for key in keys},
                "figures": {key: _rounded(value) for key, value in record.figures.items()},
                "train": _columns(record.train),
                "val": _columns(record.val),
            }
            for record, label, colour, shade in runs
        ],
    }
    script, style = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    page = (_HERE / "page.html").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {"STYLE": style, "SCRIPT": script, "SCRIPT_SHA256": digest, "DATA": _json(data)}
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], page)  # one pass: what parts contain stays


def _json(data: dict[str, Any]) -> str:
    """Return JSON that cannot end the HTML element that contains it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _columns(points: Sequence[Point]) -> dict[str, list[float | None]]:
    return {key: [_rounded(point[key]) for point in points] for key in (points[0] if points else ()) if key != "rate"}


def _rounded(value: float | None) -> float | None:
    """Keep six digits: more than a screen can show, and half the size."""
    return None if value is None else float(f"{value:.6g}")
