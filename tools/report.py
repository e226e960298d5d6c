"""Compares runs: one HTML page with their curves, their results and the settings in which they
differ.

No file of a run is trusted. The page shows names and settings as text, runs no script and loads
nothing.
"""

import base64
import html
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from common.command_line import Items
from common.console import count, say, warn
from common.figures import drawn, log_scale, png, short_count
from common.files import (
    file_size,
    make_directory,
    open_file,
    read_json,
    refuse_foreign,
    write_atomic,
)
from common.settings import JsonDict, UserError, flat
from runtime.metrics import read_metrics
from trainer.curves import RunCurves, set_limits

_ALIKE = 1.1
"""Tokens of one vocabulary are as long, up to this factor, in any part of a validation split."""
_COLOURS = 7
"""Colours of the style, without its grey. More rows are coloured by their rank."""
_GENERATOR = '<meta name="generator" content="scripts/report.py">'


@dataclass(frozen=True)
class Run:
    """What metrics.jsonl, config.json and error.txt say of a run."""

    name: str
    """Its folder, relative to the one that holds all runs of the report."""
    settings: JsonDict
    """Values by dotted key, without null."""
    n_params: float | None
    curves: RunCurves
    step: int
    """The last step."""
    speed: float | None
    """Median of tokens per second."""
    bits_per_nat: float | None
    """Validation loss in bits per byte, divided by the loss in nats per token."""
    failure: str
    """Last line of the error.txt of a sweep's job; "" if it did not fail."""


@dataclass(frozen=True)
class Row:
    """Runs that differ only in the seed, and their lowest validation losses in the report's
    unit."""

    runs: list[Run]
    losses: list[float]
    """Of the runs that were evaluated."""

    @property
    def loss(self) -> float:
        """Mean of the losses; infinite if no run was evaluated."""
        return fmean(self.losses) if self.losses else math.inf


def write_report(folders: Items[Path], out: Path | None) -> Path:
    """Compare all runs in `folders`: write report.html into `out` and return its path.

    Raises:
        UserError: there is no run, or `out` cannot be written to or holds another report.html.
    """
    runs = read_runs(folders)
    folder = folders[0] if len(folders) == 1 else _common_folder(folders)
    page = make_directory(out or folder, "out") / "report.html"
    refuse_foreign(_GENERATOR.encode(), page)
    title = ", ".join(map(str, folders[:3])) + (" and others" if len(folders) > 3 else "")
    rows, unit = rows_of(runs)
    best = rows[0]
    lowest = ""
    if best.losses:
        mean = f" (mean of {len(best.losses)} seeds)" if len(best.losses) > 1 else ""
        lowest = f"; lowest validation loss {best.loss:.4f} {unit}: {best.runs[0].name}{mean}"
    say(f"{count(len(runs), 'run')}{lowest}")
    varying = varying_settings(runs)
    texts = [key for key in ("dataset_dir", "data.loss", "eval.batches") if key in varying]
    if texts:
        what = f"runs differ in {' and '.join(texts)}"
        warn(f"{what}: losses of other validation tokens cannot be compared")
    for run in runs:
        if run.failure:
            warn(f"{run.name} failed: {run.failure}")
    write_atomic(page, page_of(rows, unit, varying, printable(title)).encode())
    say(f"written: {page}")
    return page


# ----- reading runs


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Return all runs in these folders.

    Raises:
        UserError: a folder is missing, or none has a run in it.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            what = "the folder of a run, of a sweep, or of many runs"
            raise UserError(f"{path} is not a folder: give {what}")
        inside = list(_runs_in(path))
        if not inside and len(paths) > 1:
            warn(f"no run in {path}: a run has a metrics.jsonl")
        folders |= dict.fromkeys(inside)
    above = _common_folder(paths) if len(folders) > 1 else _common_folder(folders).parent
    runs = []
    for folder in folders:
        try:
            runs.append(_read_run(folder, printable(os.path.relpath(folder.absolute(), above))))
        except (UserError, OSError) as error:
            warn(f"skipping {folder}: {error}")
    if not runs:
        where = ", ".join(map(str, paths)) or "folders=[]"
        raise UserError(f"no run in {where}: a run has a metrics.jsonl")
    return runs


def _common_folder(paths: Sequence[Path] | dict[Path, None]) -> Path:
    """Return the deepest folder that contains all of them, or is one of them."""
    return Path(os.path.commonpath([path.absolute() for path in paths] or [Path.cwd()]))


def _runs_in(path: Path) -> Iterator[Path]:
    """Yield the run at this path, or those below it. Links to folders are not followed."""
    for folder, inside, files in os.walk(path):
        inside.sort()
        if "metrics.jsonl" in [*files, *inside] or _failure(Path(folder)):
            inside.clear()
            yield Path(folder)


def _failure(folder: Path) -> str:
    """Return the last line of error.txt; "" if a run continued since, or it is no job's of a
    sweep."""
    error, log = folder / "error.txt", folder / "metrics.jsonl"
    try:
        if "=" not in folder.name or (log.exists() and log.stat().st_mtime > error.stat().st_mtime):
            return ""
        with open_file(error) as file:
            text = file.read(2**16).decode(errors="replace")
    except (UserError, OSError):
        return ""
    return printable(text.strip().rpartition("\n")[2])


def _read_run(folder: Path, name: str) -> Run:
    config, environment = _stored(folder)
    settings = {key: value for key, value in flat(config).items() if value is not None}
    curves, step, speeds, bits_per_nat = RunCurves(), 0, [], None
    log = folder / "metrics.jsonl"
    begun = file_size(log) is not None  # raises if it is not a regular file
    for line in read_metrics(log) if begun else []:
        curves.add(line)
        step = max(step, line["step"])
        speed = _number(line.get("tokens_per_second"))
        if speed is not None:
            speeds.append(speed)
        bits = _number(line.get("val_bits_per_byte"))
        if bits and line.get("val_loss"):
            bits_per_nat = bits / line["val_loss"]
    n_params = _number(environment.get("n_params"))
    speed = median(speeds) if speeds else None
    return Run(name, settings, n_params, curves, step, speed, bits_per_nat, _failure(folder))


def _stored(folder: Path) -> tuple[JsonDict, JsonDict]:
    """Return a run's configuration and environment."""
    if not (folder / "metrics.jsonl").exists():  # a job that failed before its first step
        return {}, {}
    try:
        stored = read_json(folder / "config.json")
    except UserError as error:
        warn(f"the settings of {folder} are unknown: {error}")
        return {}, {}
    sections = stored if isinstance(stored, dict) else {}
    config, environment = sections.get("config"), sections.get("environment")
    return (
        config if isinstance(config, dict) else {},
        environment if isinstance(environment, dict) else {},
    )


def _number(value: Any) -> float | None:
    """Return a finite number, and None for anything else: true, a text, too large an integer."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None


# ----- comparing runs


def rows_of(runs: Sequence[Run]) -> tuple[list[Row], str]:
    """Return the report's rows, the best first, and the unit of their losses.

    The unit is bits per byte if tokens of the runs differ in length.
    """
    ratios = [run.bits_per_nat for run in runs if run.bits_per_nat is not None]
    in_bits = bool(ratios) and max(ratios) > _ALIKE * min(ratios)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        alone = run.name if run.failure or "seed" not in run.settings else ""
        ignored = ("seed", "run_dir")
        alike = {key: value for key, value in run.settings.items() if key not in ignored}
        groups.setdefault(json.dumps([alone, alike], sort_keys=True), []).append(run)
    rows = []
    for group in groups.values():
        curves = [validation(run, in_bits) for run in group]
        rows.append(Row(group, [min(loss for _, loss in curve) for curve in curves if curve]))
    rows.sort(key=lambda row: (row.loss, row.runs[0].name))
    return rows, "bits per byte" if in_bits else "nats per token"


def validation(run: Run, in_bits: bool) -> list[tuple[int, float]]:
    """Return tokens and loss of every evaluation; [] if the loss is not known in bits."""
    if not in_bits:
        return run.curves.val
    ratio = run.bits_per_nat
    return [] if ratio is None else [(tokens, loss * ratio) for tokens, loss in run.curves.val]


def varying_settings(runs: Sequence[Run]) -> list[str]:
    """Return the settings in which the runs differ."""
    known = [run.settings for run in runs if run.settings]
    keys = dict.fromkeys(key for settings in known for key in settings)
    values = {key: {json.dumps(settings.get(key)) for settings in known} for key in keys}
    return [key for key in keys if len(values[key]) > 1 and key != "run_dir"]


# ----- the page


def page_of(rows: Sequence[Row], unit: str, keys: Sequence[str], title: str) -> str:
    """Return the report as one HTML file. keys: the settings that the table shows."""
    colours = _colours(len(rows))
    picture = drawn("the report's picture", lambda: _draw(rows, unit, colours))
    lines = [_cells(row, unit, keys) for row in rows]
    columns = [name for name in lines[0] if any(line[name] for line in lines)]
    head = "".join(f"<th>{html.escape(printable(name))}</th>" for name in columns)
    body = ""
    for line, colour in zip(lines, colours, strict=True):
        cells = "".join(f"<td>{html.escape(line[name])}</td>" for name in columns)
        body += f'<tr><td style="color: {colour}">&#9632;</td>{cells}</tr>\n'
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    return _PAGE.format(
        generator=_GENERATOR,
        title=html.escape(title),
        style=_STYLE,
        made=made,
        picture=base64.b64encode(picture or b"").decode(),
        head=head,
        body=body,
    )


_STYLE = """
body { font: 14px sans-serif; margin: 2em; }
img { max-width: 100%; }
table { border-collapse: collapse; }
td, th { border-bottom: 1px solid #ddd; padding: 4px 10px; text-align: left; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
{generator}
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
<h1>{title}</h1>
<p>{made}</p>
<img alt="Losses over tokens" src="data:image/png;base64,{picture}">
<table>
<tr><th></th>{head}</tr>
{body}</table>
</html>
"""


def _cells(row: Row, unit: str, keys: Sequence[str]) -> dict[str, str]:
    """Return a row of the table by the titles of its columns; "" where nothing is known."""
    runs, losses = row.runs, row.losses
    training = [run.curves.loss.smoothed(0.02)[-1] for run in runs if run.curves.loss.bins]
    speeds = [run.speed for run in runs if run.speed is not None]
    tokens = [_last_tokens(run) for run in runs]
    spread = f"{min(losses):.4f} to {max(losses):.4f}" if len(losses) > 1 else ""
    cells = {}
    for key in keys:
        values = dict.fromkeys(brief(run.settings.get(key)) for run in runs)
        cells[key] = ", ".join(values)
    return cells | {
        f"lowest validation loss ({unit})": f"{row.loss:.4f}" if losses else "",
        "range of seeds": spread,
        "training loss": f"{fmean(training):.4f}" if training else "",
        "step": f"{min(run.step for run in runs):,}",
        "of steps": brief(runs[0].settings.get("max_steps", "")),
        "tokens": f"{min(tokens):,}",
        "tokens per second": f"{fmean(speeds):,.0f}" if speeds else "",
        "parameters": "" if runs[0].n_params is None else f"{runs[0].n_params:,.0f}",
        "failed": runs[0].failure,
        "folder": "; ".join(run.name for run in runs),
    }


def _last_tokens(run: Run) -> int:
    last = [stretch.place for stretch in run.curves.loss.bins[-1:]]
    return max([*last, *(tokens for tokens, _ in run.curves.val[-1:])], default=0)


def _colours(n_rows: int) -> list[str]:
    """Return a colour for each row; of many rows, the best are dark and the worst yellow."""
    if n_rows <= _COLOURS:
        cycle = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
        return [to_hex(colour) for colour in cycle[:n_rows]]
    scale = matplotlib.colormaps["cividis"]
    return [to_hex(scale(0.95 * rank / (n_rows - 1))) for rank in range(n_rows)]


def _draw(rows: Sequence[Row], unit: str, colours: Sequence[str]) -> bytes:
    """Draw validation and training loss over tokens, the best row on top, as a PNG."""
    figure = Figure(figsize=(12, 5))
    left, right = figure.subplots(1, 2)
    evaluated: list[tuple[int, float]] = []
    trained: list[tuple[int, float]] = []
    for row, colour in reversed([*zip(rows, colours, strict=True)]):
        for run in row.runs:
            evaluated += _plot(left, validation(run, unit == "bits per byte"), colour)
            losses, means = run.curves.loss, run.curves.loss.smoothed(0.02)
            tokens = [stretch.place for stretch in losses.bins]
            trained += _plot(right, [*zip(tokens, means, strict=True)], colour)
    for axes, points in ((left, evaluated), (right, trained)):
        values = [loss for _, loss in points if loss > 0]
        if values and max(values) > 10 * min(values):
            log_scale(axes)
        else:
            set_limits(axes, points)
        axes.set_xlabel("tokens")
        axes.xaxis.set_major_formatter(short_count)
    left.set_ylabel(f"validation loss ({unit})")
    right.set_ylabel("training loss (nats per token)")
    return png(figure)


def _plot(
    axes: Axes, points: Sequence[tuple[int, float]], colour: str
) -> Sequence[tuple[int, float]]:
    """Draw a curve, and return its points."""
    tokens = [place for place, _ in points]
    losses = [loss for _, loss in points]
    axes.plot(tokens, losses, color=colour, marker="o" if len(points) <= 20 else "")
    return points


def brief(value: Any) -> str:
    """Return a setting as a short text."""
    if isinstance(value, float):
        return f"{value:g}"
    return printable(value if isinstance(value, str) else json.dumps(value))


def printable(value: str) -> str:
    """Return a text of one line that can be encoded, whatever the file or its name contains."""
    escaped = (
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in value
    )
    return "".join(escaped)[:300]
