"""Runs as a report sees them: it reads metrics.jsonl, config.json and error.txt, and opens nothing else.

No file is trusted: a value that is not a number is ignored, and a damaged file causes a warning.
"""

import itertools
import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.console import warn
from common.files import file_size, open_file, read_json
from common.settings import JsonDict, UserError, differences
from trainer.curves import Curve
from trainer.metrics import read_metrics

_MOST_POINTS = 300  # of a curve of training
_ALIKE = 1.1  # tokens of one vocabulary are as long, up to this factor, in any part of a validation split
_COMPARED_LAST = (
    "checkpoint.",
    "dataset_dir",
    "eval.",
    "resume",
    "runtime.",
    "stop_at",
    "tracker.",
)

TRAINING = ("loss", "lr", "grad_norm", "tokens_per_second")
EVALUATION = ("val_loss", "val_bits_per_byte")

Point = dict[str, Any]
"""A point of a curve: step, tokens, flops (None if unknown), seconds (None if unknown), value; or a run's figures.

A point of training stands for several steps: value is their mean, low and high their range.
"""


@dataclass(frozen=True)
class Record:
    """One run, or the runs that differ in their seeds only."""

    name: str
    """Its folder, relative to the one that holds all runs of the report."""
    settings: JsonDict
    """Its configuration, flat: {"optim.max_lr": 0.01}; null and absent are the same."""
    curves: dict[str, list[Point]]
    """Points by what they are of, as TRAINING and EVALUATION name it; of several runs, the mean where all have one."""
    figures: Point
    """nats, bits, best_step, loss, step, max_steps, tokens, flops, seconds, rate, n_params; of several runs, the mean.

    best is nats, or bits if `in_bits`; low and high are its range, and runs is how many there are.
    """
    members: tuple["Record", ...] = ()
    """The runs, if there are several."""
    failure: str = ""
    """The last line of the error.txt of a sweep's job; "" if it did not fail."""


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Return all runs in these folders, seeds together, the best first, those without an evaluation last.

    Raises:
        UserError: a folder is missing, or none has a run in it.
    """
    for path in paths:
        if not path.is_dir():
            raise UserError(
                f"{path} is not a folder: give the folder of a run, of a sweep, or of many runs"
            )
        if next(_runs_in(path), None) is None and len(paths) > 1:
            warn(f"no run in {path}: a run has a metrics.jsonl")
    folders = list(dict.fromkeys(folder for path in paths for folder in _runs_in(path)))
    above = [folder.absolute().parent for folder in folders]
    common = common_folder(paths if len(folders) > 1 else above or paths or [Path()])
    records = [record for folder in folders if (record := _read(folder, common)) is not None]
    if not records:
        raise UserError(
            f"no run in {', '.join(map(str, paths)) or 'folders=[]'}: a run has a metrics.jsonl"
        )
    if in_bits(records):
        for record in records:
            record.figures.update(dict.fromkeys(("best", "low", "high"), record.figures["bits"]))
    return sorted(grouped(records), key=_rank)


def in_bits(records: Sequence[Record]) -> bool:
    """Whether losses are compared in bits per byte, because tokens of the runs differ in length."""
    known = [r.figures for r in records if r.figures["bits"] and r.figures["nats"]]
    ratios = [figures["bits"] / figures["nats"] for figures in known]
    return bool(ratios) and max(ratios) > _ALIKE * min(ratios)


def _rank(record: Record) -> tuple[float, str]:
    best = record.figures["best"]
    return math.inf if best is None else best, record.name


def grouped(records: Sequence[Record]) -> list[Record]:
    """Put runs together that differ in their seeds only."""
    keys = [key for key in varying_settings(records) if key != "seed"]
    groups: dict[str, list[Record]] = {}
    for record in records:
        alone = record.name if record.failure or record.settings.get("seed") is None else None
        alike = json.dumps([alone, *(record.settings.get(key) for key in keys)])
        groups.setdefault(alike, []).append(record)
    joined = []
    for runs in groups.values():
        seeds = {json.dumps(run.settings.get("seed")) for run in runs}
        distinct = (
            1 < len(seeds) == len(runs)
        )  # two of one seed differ in something that no setting tells
        joined += [_together(runs)] if distinct else runs
    return joined


def _together(runs: Sequence[Record]) -> Record:
    bests = [best for run in runs if (best := run.figures["best"]) is not None]
    seeds = sorted((run.settings.get("seed") for run in runs), key=str)
    figures = {key: _mean_of_known([run.figures[key] for run in runs]) for key in runs[0].figures}
    figures["step"] = min(run.figures["step"] or 0.0 for run in runs)
    figures |= {
        "best_step": None,
        "low": min(bests, default=None),
        "high": max(bests, default=None),
        "runs": len(runs),
    }
    curves = {key: _mean_curve([run.curves[key] for run in runs]) for key in runs[0].curves}
    settings = runs[0].settings | {"seed": ", ".join(map(brief, seeds))}
    return Record(
        ", ".join(run.name for run in runs),
        settings,
        curves,
        figures,
        tuple(sorted(runs, key=_rank)),
    )


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return (
        sum(value / len(known) for value in known) if known else None
    )  # a sum of huge losses would overflow


def _mean_curve(curves: Sequence[list[Point]]) -> list[Point]:
    """Return the mean at the steps that are in all of the curves."""
    by_step = [{point["step"]: point for point in curve} for curve in curves if curve]
    steps = [
        step
        for step in (by_step[0] if by_step else ())
        if all(step in points for points in by_step)
    ]
    return [
        {key: _mean_of_known([points[step][key] for points in by_step]) for key in by_step[0][step]}
        for step in steps
    ]


def common_folder(paths: Sequence[Path]) -> Path:
    """Return the deepest folder that contains all of them, or is one of them."""
    return Path(os.path.commonpath([path.absolute() for path in paths]))


def _runs_in(path: Path) -> Iterator[Path]:
    """Yield the run at this path, or those below it. Links to folders are not followed."""
    for folder, inside, files in os.walk(path):
        inside.sort()
        if "metrics.jsonl" in [*files, *inside] or _failure(Path(folder)):
            inside.clear()
            yield Path(folder)


def _failure(folder: Path) -> str:
    """Return the last line of error.txt; "" if it is not that of a sweep's job, or the run has gone on since."""
    error, log = folder / "error.txt", folder / "metrics.jsonl"
    try:
        if "=" not in folder.name or (log.exists() and log.stat().st_mtime > error.stat().st_mtime):
            return ""
        with open_file(error) as file:
            return printable(file.read(2**16).decode(errors="replace").strip().rpartition("\n")[2])
    except (UserError, OSError):
        return ""


def _read(folder: Path, common: Path) -> Record | None:
    try:
        is_begun = (
            file_size(folder / "metrics.jsonl") is not None
        )  # raises if it is not a regular file
        config, environment = _stored(folder) if is_begun else ({}, {})
        lines = read_metrics(folder / "metrics.jsonl") if is_begun else []
        curves = _curves(lines, _number(environment.get("flops_per_token")))
    except (UserError, OSError) as error:
        warn(f"skipping {folder}: {error}")
        return None
    known = {
        "max_steps": _number(config.get("max_steps")),
        "n_params": _number(environment.get("n_params")),
    }
    settings = {key: value for key, (value, _) in differences(config, {}).items()}
    name = printable(os.path.relpath(folder.absolute(), common))
    return Record(name, settings, curves, known | _figures(curves), failure=_failure(folder))


def _stored(folder: Path) -> tuple[JsonDict, JsonDict]:
    """Return a run's configuration and its environment."""
    try:
        raw = read_json(folder / "config.json")
    except UserError as error:
        warn(f"the settings of {folder} are unknown: {error}")
        return {}, {}
    found = (raw.get(key) if isinstance(raw, dict) else None for key in ("config", "environment"))
    config, environment = (value if isinstance(value, dict) else {} for value in found)
    return config, environment


def _curves(lines: Iterable[JsonDict], flops_per_token: float | None) -> dict[str, list[Point]]:
    """Return the points of training and of evaluations.

    Seconds count only training, by the rate in each line, without evaluations, saves and pauses.
    """
    train = {key: Curve(_MOST_POINTS) for key in TRAINING}
    val: dict[str, list[Point]] = {key: [] for key in EVALUATION}
    seconds, timed_tokens = 0.0, 0.0
    for line in lines:
        numbers = {
            key: number for key, value in line.items() if (number := _number(value)) is not None
        }
        if not numbers.keys() >= {"step", "tokens"} or "event" in line:
            continue
        tokens, rate = numbers["tokens"], numbers.get("tokens_per_second", 0.0)
        if rate > 0 and tokens > timed_tokens:
            seconds, timed_tokens = seconds + (tokens - timed_tokens) / rate, tokens
        flops = None if flops_per_token is None else _number(tokens * flops_per_token)
        place = {
            "step": numbers["step"],
            "tokens": tokens,
            "flops": flops,
            "seconds": _number(seconds) or None,
        }
        for key in TRAINING:
            if key in numbers:
                train[key].add(place, numbers[key])
        for key in EVALUATION:
            if key in numbers:
                val[key].append({**place, "value": numbers[key]})
    points = {
        key: [
            {**part.place, "value": part.mean, "low": part.low, "high": part.high}
            for part in curve.bins
        ]
        for key, curve in train.items()
    }
    return points | val


def _figures(curves: dict[str, list[Point]]) -> Point:
    ends = [curves[key][-1] for key in ("loss", "val_loss") if curves[key]]
    last: Point = max(ends, key=lambda point: point["step"], default={})
    best: Point = min(curves["val_loss"], key=lambda point: point["value"], default={})
    bits = [
        point["value"] for point in curves["val_bits_per_byte"] if point["step"] == best.get("step")
    ]
    late = curves["loss"][-max(1, len(curves["loss"]) // 20) :]
    rates = [point["value"] for point in curves["tokens_per_second"]]
    return {
        **{key: last.get(key) for key in ("step", "tokens", "flops", "seconds")},
        **dict.fromkeys(("nats", "best", "low", "high"), best.get("value")),
        "runs": 1,
        "best_step": best.get("step"),
        "bits": bits[-1] if bits else None,
        "loss": _mean_of_known([point["value"] for point in late]),
        "rate": statistics.median_high(rates) if rates else None,
    }


def _number(value: Any) -> float | None:
    """Return a finite number as a float, and None for anything else: true, a string, too large an integer."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def lowest_loss(records: Sequence[Record]) -> str | None:
    """Return the best run's loss with its unit."""
    best = records[0].figures["best"]
    return (
        None
        if best is None
        else f"{best:.4f} {'bits per byte' if in_bits(records) else 'nats per token'}"
    )


def varying_settings(records: Sequence[Record]) -> list[str]:
    """Return the settings in which the runs differ: first those that change what is learned, and have most values."""
    keys = dict.fromkeys(itertools.chain.from_iterable(record.settings for record in records))
    known = [record.settings for record in records if record.settings]
    values = {key: {json.dumps(settings.get(key)) for settings in known} for key in keys}
    varying = [key for key in keys if len(values[key]) > 1 and key != "run_dir"]
    return sorted(varying, key=lambda key: (key.startswith(_COMPARED_LAST), -len(values[key]), key))


def shown(value: Any) -> float | str:
    """Return a setting as an axis and a table need it: a number, or a text of one line."""
    if (number := _number(value)) is not None:
        return number
    return printable(value if isinstance(value, str) else json.dumps(value))


def labels(records: Sequence[Record]) -> list[str]:
    """Return short names: the settings in which the runs differ, or their folders if the settings are not enough."""
    keys = [
        key
        for key in varying_settings(records)
        if key != "seed" or all(not r.members for r in records)
    ]
    ends = [key.rpartition(".")[2] for key in keys]
    parts = {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}
    short = [
        ", ".join(
            f"{part}={brief(r.settings.get(key))}" for key, part in parts.items() if r.settings
        )
        or r.name
        for r in records
    ]
    enough = keys and len(set(short)) == len(short) and max(map(len, short)) <= 80
    names = (
        short
        if enough
        else [record.members[0].name if record.members else record.name for record in records]
    )
    counts = [
        f" (mean of {len(record.members)} runs)" if record.members else "" for record in records
    ]
    return [name + count for name, count in zip(names, counts, strict=True)]


def brief(value: Any) -> str:
    """Return a setting as a short text."""
    given = shown(value)
    return f"{given:g}" if isinstance(given, float) else given


def printable(value: str) -> str:
    """Return a text that can be encoded and is a single line, whatever the file or its name contains."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in value
    )[:300]
