"""Write a report: the page, the picture, and a line on the best run."""

import math
import time
from collections.abc import Sequence
from pathlib import Path

from common.console import count, say, warn
from common.files import make_directory, refuse_foreign, write_atomic
from common.settings import UserError
from common.words import Items
from tools.report.page import draw_curves, page_of
from tools.report.records import (
    Record,
    common_folder,
    labels,
    lowest_loss,
    printable,
    read_records,
    varying_settings,
)

_REFRESH = 10.0
"""Seconds between two looks at running runs."""
_LAST_LOOKS = 12
"""Watching stops when this many looks in a row find all runs ended: a sweep's next job may be about to start."""


def write_report(folders: Items[Path], out: Path | None, watch: bool = False) -> Path:
    """Compare all runs in `folders`: write a page and a picture into `out`, and return the path of the page.

    With `watch`, first keep a page up to date that browsers load again and again, until every run is at its end.

    Raises:
        UserError: there is no run, or `out` cannot be written to or holds a report.html that is no report.
    """
    records = read_records(folders)
    out = make_directory(
        out or (folders[0] if len(folders) == 1 else common_folder(folders)), "out"
    )
    page, picture = out / "report.html", out / "report.png"
    refuse_foreign(b"script-src 'sha256-", page, picture)
    title = printable(
        ", ".join(map(str, folders[:3]))
        + (f" and {len(folders) - 3} more" if len(folders) > 3 else "")
    )
    looks = 0 if watch and not _ended(records) else _LAST_LOOKS
    if looks == 0:
        say(
            f"open {page.absolute().as_uri()} in a browser: it follows the runs until all have ended (or Ctrl-C)"
        )
    while looks < _LAST_LOOKS:
        write_atomic(page, page_of(records, title, _REFRESH).encode())
        time.sleep(_REFRESH)
        try:
            records = read_records(folders)
        except (UserError, OSError) as error:  # a run may be moved, or written at this moment
            warn(f"{error}: trying again in {_REFRESH:g} seconds")
            continue
        looks = looks + 1 if _ended(records) else 0
    best, name = lowest_loss(records), labels(records)[0]
    lowest = "" if best is None else f"; lowest validation loss {best}: {name}"
    say(f"{count(sum(record.figures['runs'] for record in records), 'run')}{lowest}")
    varying = varying_settings(records)
    if text := [key for key in ("dataset_dir", "data.loss", "eval.batches") if key in varying]:
        warn(
            f"runs differ in {' and '.join(text)}: losses of other validation tokens cannot be compared"
        )
    for record in records:
        if record.failure:
            warn(f"{record.name} failed: {record.failure}")
    for path, content in (
        (page, page_of(records, title).encode()),
        (picture, draw_curves(records, title)),
    ):
        write_atomic(path, content)
        say(f"written: {path}")
    return page


def _ended(records: Sequence[Record]) -> bool:
    """Whether every run has failed, or is at the last step of its schedule."""
    return all(
        record.failure or (record.figures["step"] or 0) >= (record.figures["max_steps"] or math.inf)
        for record in records
    )
