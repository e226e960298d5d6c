"""Compares runs: one HTML page with their curves, results, and the settings in which they differ.

No file of a run is trusted. The page shows names and settings as text, runs no script and loads
nothing.
"""

import base64
import html
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.text import Text

from common.command_line import Items, format_options
from common.console import count, say, show_table, table_of, warn
from common.figures import draw_or_warn, encode_png, format_count
from common.files import (
    file_size,
    make_directory,
    open_file,
    read_json,
    refuse_foreign,
    write_atomic,
)
from common.numbers import plus_minus
from common.settings import JsonDict, UserError, escape_controls, flatten, section
from trainer.records.curves import RunCurves, set_limits, smoothed
from trainer.records.metrics import read_metrics

_LEFT_OUT = ("step", "of steps", "tokens", "parameters")
"""Columns that the table on a terminal has no room for."""
_GENERATOR = '<meta name="generator" content="scripts/report.py">'
_MOST_NAMES = 10  # of runs beside a picture
_LOSS_KEYS = {"nats per token": "val_loss", "bits per byte": "val_bits_per_byte"}
"""The unit of a validation loss, and its key in metrics.jsonl."""


class Evaluation(NamedTuple):
    """A validation loss, as metrics.jsonl has it."""

    loss: float
    tokens: int
    stderr: list[float]
    """Its standard error; []: unknown."""
    groups: list[float]
    """Losses of groups of windows; []: unknown."""


@dataclass(frozen=True)
class ReportedRun:
    """A run, as its metrics.jsonl, config.json and error.txt describe it."""

    name: str
    """Its folder, relative to the one that holds all runs of the report."""
    settings: JsonDict
    """Values by dotted key, without null."""
    n_params: list[float]
    """[]: unknown."""
    curves: RunCurves
    step: int
    """The last step."""
    speeds: list[float]
    """Tokens per second."""
    evaluations: dict[str, list[Evaluation]]
    """By the unit of the loss."""
    tokenizer: Any
    """Its sha256; None: unknown."""
    failure: str
    """Last line of the error.txt of a sweep's job; "" if it did not fail."""


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in the seed, and their lowest validation losses."""

    runs: list[ReportedRun]
    unit: str
    lowest: list[Evaluation]
    """Of the runs that were evaluated."""

    @property
    def losses(self) -> list[float]:
        """The lowest loss of each run."""
        return [each.loss for each in self.lowest]

    @property
    def loss(self) -> float:
        """Mean of the losses; infinite if no run was evaluated."""
        return fmean(self.losses) if self.lowest else math.inf

    @property
    def stderr(self) -> float | None:
        """Standard error of the loss over windows, which are the same for all seeds."""
        known = [stderr for each in self.lowest for stderr in each.stderr]
        return fmean(known) if known else None


def write_report(folders: Items[Path], out: Path | None) -> Path:
    """Compare all runs in `folders`: write report.html into `out` and return its path.

    Raises:
        UserError: there is no run, or `out` cannot be written to or holds another report.html.
    """
    runs = read_runs(folders)
    folder = folders[0] if len(folders) == 1 else _find_common_folder(folders)
    page = make_directory(out or folder, "out") / "report.html"
    refuse_foreign(_GENERATOR.encode(), page)
    # A line on the best.
    rows = group_seeds(runs)
    best = rows[0]
    lowest = ""
    if best.losses:
        mean = f" (mean of {len(best.losses)} seeds)" if len(best.losses) > 1 else ""
        name = best.runs[0].name
        loss = f"{best.loss:.4f}{plus_minus(best.stderr)} {best.unit}"
        lowest = f"; lowest validation loss {loss}: {name}{mean}"
    say(f"{count(len(runs), 'run')}{lowest}")
    # Warnings: what cannot be compared, and who failed.
    varying = find_varying(runs)
    texts = [key for key in ("dataset_dir", "data.loss", "eval.batches") if key in varying]
    if best.unit == "bits per byte":
        warn("runs have different vocabularies: bits per byte of the same text can be compared")
    elif texts:
        keys = " and ".join(texts)
        warn(f"runs differ in {keys}: losses of other validation tokens cannot be compared")
    for run in runs:
        if run.failure:
            warn(f"{run.name} failed: {run.failure}")
    title = _shorten(", ".join(map(str, folders)))
    write_atomic(page, format_page(rows, varying, title).encode())
    say(f"written: {page}")
    return page


def show_runs(folder: Path) -> None:
    """Print a table of the runs in a folder, best first, and the command of their report."""
    runs = read_runs([folder])
    lines, columns = _tabulate(group_seeds(runs), find_varying(runs))
    columns = [name for name in columns if name not in _LEFT_OUT]
    table = table_of(columns)
    for line in lines:
        table.add_row(*[Text(line[name]) for name in columns])
    show_table(table)
    say(f"to compare them: python scripts/report.py {format_options({'folders': str(folder)})}")


# ----- reading runs


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Return all runs in these folders.

    Raises:
        UserError: a folder is missing, or none has a run in it.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(
                f"{path} is not a folder: give the folder of a run, of a sweep, or of many runs"
            )
        run_folders = list(_find_runs(path))
        if not run_folders and len(paths) > 1:
            warn(f"no run in {path}: a run has a metrics.jsonl")
        folders |= dict.fromkeys(run_folders)
    runs = []
    for folder in folders:
        path = folder.absolute()
        top = _find_common_folder(paths) if len(folders) > 1 else path.parent
        try:
            runs.append(_read_run(folder, _shorten(os.path.relpath(path, top))))
        except (UserError, OSError) as error:
            warn(f"skipping {folder}: {error}")
    if not runs:
        where = ", ".join(map(str, paths)) or "folders=[]"
        raise UserError(f"no run in {where}: a run has a metrics.jsonl")
    return runs


def _find_common_folder(paths: Iterable[Path]) -> Path:
    """Return the deepest folder that contains all of them, or is one of them."""
    return Path(os.path.commonpath([path.absolute() for path in paths]))


def _find_runs(path: Path) -> Iterator[Path]:
    """Yield the run at this path, or those below it. Links to folders are not followed."""
    for folder, subfolders, files in os.walk(path):
        subfolders.sort()
        if "metrics.jsonl" in [*files, *subfolders] or _read_failure(Path(folder)):
            subfolders.clear()
            yield Path(folder)


def _read_failure(folder: Path) -> str:
    """Return the last line of error.txt, which a failed job of a sweep has; "" if there is none."""
    try:
        with open_file(folder / "error.txt") as file:
            text = file.read(2**16).decode(errors="replace")
    except (UserError, OSError):
        return ""
    return _shorten(text.strip().rpartition("\n")[2])


def _read_run(folder: Path, name: str) -> ReportedRun:
    # metrics.jsonl, which a job that failed early lacks.
    stored: Any = {}
    curves = RunCurves()
    step = 0
    speeds: list[float] = []
    evaluations: dict[str, list[Evaluation]] = {unit: [] for unit in _LOSS_KEYS}
    log = folder / "metrics.jsonl"
    if file_size(log) is not None:  # raises if it is not a regular file
        try:
            stored = read_json(folder / "config.json")
        except UserError as error:
            warn(f"the settings of {folder} are unknown: {error}")
        for line in read_metrics(log):
            curves.add(line)
            step = max(step, line["step"])
            speeds += _find_numbers(line.get("tokens_per_second"))
            for unit, key in _LOSS_KEYS.items():
                for loss in _find_numbers(line.get(key)):
                    stderr = _find_numbers(line.get(f"{key}_stderr"))
                    groups = _find_numbers(line.get(f"{key}_groups"))
                    evaluations[unit].append(Evaluation(loss, line["tokens"], stderr, groups))
    # config.json: settings, and what the run knew of its model.
    config = section(stored, "config")
    settings = {key: value for key, value in flatten(config).items() if value is not None}
    environment = section(stored, "environment")
    return ReportedRun(
        name,
        settings,
        _find_numbers(environment.get("n_params")),
        curves,
        step,
        speeds,
        evaluations,
        environment.get("tokenizer"),
        _read_failure(folder),
    )


def _find_numbers(value: Any) -> list[float]:
    """Return what is a finite number of a value, or of a list: no text, no too large integer."""
    values = value if isinstance(value, list) else [value]
    return [float(x) for x in values if isinstance(x, int | float) and abs(x) < 1e300]


# ----- comparing runs


def group_seeds(runs: Sequence[ReportedRun]) -> list[SeedGroup]:
    """Return the report's rows, the best first."""
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        # A failed run, and one without known settings, has a row of its own.
        is_alone = run.failure or "seed" not in run.settings
        settings = run.settings | {"seed": run.name if is_alone else "", "run_dir": ""}
        groups.setdefault(json.dumps(settings, sort_keys=True), []).append(run)
    tokenizers = {json.dumps(run.tokenizer) for run in runs if run.tokenizer}
    unit = "bits per byte" if len(tokenizers) > 1 else "nats per token"
    rows = [SeedGroup(group, unit, _find_lowest(group, unit)) for group in groups.values()]
    return sorted(rows, key=lambda row: (row.loss, row.runs[0].name))


def _find_lowest(runs: Iterable[ReportedRun], unit: str) -> list[Evaluation]:
    """Return the evaluation with the lowest loss of each run that has one."""
    return [min(run.evaluations[unit]) for run in runs if run.evaluations[unit]]


def find_varying(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the settings in which the runs differ."""
    known = [run.settings for run in runs if run.settings]
    values: dict[str, set[str]] = {key: set() for settings in known for key in settings}
    for key, texts in values.items():
        texts |= {json.dumps(settings.get(key)) for settings in known}
    return [key for key, texts in values.items() if len(texts) > 1 and key != "run_dir"]


# ----- the page


def format_page(rows: Sequence[SeedGroup], keys: Sequence[str], title: str) -> str:
    """Return the report as one HTML file. keys: the settings that the table shows."""
    picture = draw_or_warn("the report's picture", lambda: _draw_curves(rows))
    lines, columns = _tabulate(rows, keys)
    head = "".join(f"<th>{html.escape(_shorten(name))}</th>" for name in columns)
    body = ""
    for line in lines:
        cells = "".join(f"<td>{html.escape(line[name])}</td>" for name in columns)
        body += f"<tr>{cells}</tr>\n"
    return _PAGE.format(
        generator=_GENERATOR,
        title=html.escape(title),
        style=_STYLE,
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
<img alt="Losses over tokens" src="data:image/png;base64,{picture}">
<table>
<tr>{head}</tr>
{body}</table>
</html>
"""


def _tabulate(
    rows: Sequence[SeedGroup], keys: Sequence[str]
) -> tuple[list[dict[str, str]], list[str]]:
    """Return the lines of the table, and the titles of columns in which something is known."""
    lines = [_format_cells(row, rows[0], keys) for row in rows]
    columns = [name for name in lines[0] if any(line[name] for line in lines)]
    return lines, columns


def _format_cells(row: SeedGroup, best: SeedGroup, keys: Sequence[str]) -> dict[str, str]:
    """Return a row of the table by the titles of its columns; "" where nothing is known."""
    runs = row.runs
    losses = row.losses
    training = [mean for run in runs for mean in smoothed(run.curves.loss.bins())[-1:]]
    speeds = [median(run.speeds) for run in runs if run.speeds]
    on_answers = " on answers" if runs[0].settings.get("data.loss") == "answers" else ""
    (other_unit,) = _LOSS_KEYS.keys() - {row.unit}
    others = [each.loss for each in _find_lowest(runs, other_unit)]
    cells = {}
    for key in keys:
        values = dict.fromkeys(_shorten(run.settings.get(key)) for run in runs)
        cells[key] = ", ".join(values)
    loss = f"{row.loss:.4f}{plus_minus(row.stderr)}{on_answers}"
    return cells | {
        f"lowest validation loss ({row.unit})": loss if losses else "",
        "above the best": _compare(row, best) if losses and row is not best else "",
        "range of seeds": f"{min(losses):.4f} to {max(losses):.4f}" if len(losses) > 1 else "",
        other_unit: f"{fmean(others):.4f}" if others else "",
        "training loss": f"{fmean(training):.4f}" if training else "",
        "step": f"{min(run.step for run in runs):,}",
        "of steps": _shorten(runs[0].settings.get("max_steps", "")),
        "tokens per second": f"{fmean(speeds):,.0f}" if speeds else "",
        "parameters": ", ".join(f"{number:,.0f}" for number in runs[0].n_params),
        "failed": runs[0].failure,
        "folder": "; ".join(run.name for run in runs),
    }


def _compare(row: SeedGroup, best: SeedGroup) -> str:
    """Say how much higher a row's loss is, with the standard error of the difference.

    Groups of windows are compared in pairs, so that what makes a window hard for both does not
    count. Seeds are not paired.
    """
    groups = [each.groups for each in (*row.lowest, *best.lowest)]
    if len({*map(len, groups)}) > 1 or len(groups[0]) < 2:
        return ""
    n = len(row.lowest)
    differences = np.mean(groups[:n], axis=0) - np.mean(groups[n:], axis=0)
    # Independent: how the two differ over windows, and the seeds of each.
    samples = [differences, *(each.losses for each in (row, best) if len(each.losses) > 1)]
    stderr = math.sqrt(sum(variance(sample) / len(sample) for sample in samples))
    difference = row.loss - best.loss
    equal = " (equal)" if difference <= 2 * stderr else ""
    return f"{difference:.4f}{plus_minus(stderr)}{equal}"


def _draw_curves(rows: Sequence[SeedGroup]) -> bytes:
    """Draw validation and training losses over tokens as a PNG. The best row is on top."""
    figure = Figure(figsize=(12, 5))
    left, right = figure.subplots(1, 2)
    unit = rows[0].unit
    for number, row in reversed([*enumerate(rows)]):
        for run in row.runs:
            label = None
            if number < _MOST_NAMES and run is row.runs[0]:
                label = f" {run.name}"  # an underscore at its beginning would hide it
            bins = run.curves.loss.bins()
            trained = [*zip((bin.tokens for bin in bins), smoothed(bins), strict=True)]
            evaluated = [(each.tokens, each.loss) for each in run.evaluations[unit]]
            for axes, points in ((left, evaluated), (right, trained)):
                tokens, losses = np.reshape(points, (-1, 2)).T
                marker = "o" if len(points) <= 20 else ""
                axes.plot(tokens, losses, color=f"C{number}", marker=marker, label=label)
    for axes in (left, right):
        set_limits(axes, [point for line in axes.lines for point in line.get_xydata().tolist()])
        axes.set_xlabel("tokens")
        axes.xaxis.set_major_formatter(format_count)
    left.set_ylabel(f"validation loss ({unit})")
    right.set_ylabel("training loss (nats per token)")
    right.legend(reverse=True)
    return encode_png(figure)


def _shorten(value: Any) -> str:
    """Return a name or a setting as a short text of one line, whatever it contains."""
    if isinstance(value, float):
        return f"{value:g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return escape_controls(text)[:300]
