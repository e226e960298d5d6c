"""Write a report: the page, the pictures, and a line on the best run."""

from collections.abc import Sequence
from pathlib import Path

from common.console import say
from common.files import make_directory, write_atomic
from tools.report.page import page_of
from tools.report.pictures import draw_curves, draw_settings
from tools.report.records import common_folder, labels, printable, read_records, varying_settings


def write_report(folders: Sequence[Path], out: Path | None) -> list[Path]:
    """Compare all runs in `folders`; return the paths of the files written into `out`, the page first.

    Raises:
        UserError: there is no run, or `out` cannot be written to.
    """
    records = read_records(folders)
    out = make_directory(out or (folders[0] if len(folders) == 1 else common_folder(folders)), "out")
    title = printable(", ".join(map(str, folders[:3])) + (f" and {len(folders) - 3} more" if len(folders) > 3 else ""))
    best, name = records[0].figures["best"], labels(records, varying_settings(records))[0]
    lowest = "" if best is None else f"; lowest validation loss {best:.4f}: {name}"
    say(f"{len(records)} run{'s' * (len(records) > 1)}{lowest}")
    contents = {
        "report.html": page_of(records, title).encode(),
        "report_curves.png": draw_curves(records, title),
        "report_settings.png": draw_settings(records, title),
    }
    paths = {out / name: content for name, content in contents.items() if content is not None}
    for path, content in paths.items():
        write_atomic(path, content)
        say(f"written: {path}")
    return list(paths)
