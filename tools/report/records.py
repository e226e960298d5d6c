"""Runs as a report sees them: it reads metrics.jsonl and config.json, and opens nothing else.

Neither file is trusted: a value that is not a number is ignored, and a damaged file causes a warning.
"""

import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from common.console import warn
from common.files import file_size, read_json
from common.settings import Settings, UserError, decode, differences
from trainer.metrics import read_metrics

MOST_SETTINGS = 12
"""Settings that a report shows."""
_MOST_POINTS = 300  # of a curve
_NOT_COMPARED = ("run_dir",)
_COMPARED_LAST = ("checkpoint.", "dataset_dir", "eval.", "resume", "runtime.", "stop_at", "tracker.")

Point = dict[str, Any]
"""A point of a curve: step, tokens, flops (None if unknown), seconds (None if unknown) and its loss."""


@dataclass(frozen=True)
class Record:
    """One run."""

    name: str
    """Its folder, relative to the one that holds all runs of the report."""
    settings: dict[str, Any]
    """Its configuration, flat: {"optim.max_lr": 0.01}; null and absent are the same."""
    train: list[Point]
    """Training: "loss", averaged over equal numbers of lines."""
    val: list[Point]
    """Evaluations: "val_loss", in nats per token, and "bits" per byte."""
    figures: Point
    """The table's figures: best, best_step, bits, loss, step, max_steps, tokens, flops, seconds, rate, n_params."""


class _Stored(Settings):
    """A run's config.json."""

    model_config = ConfigDict(extra="ignore")

    config: dict[str, Any] = Field({})
    environment: dict[str, Any] = Field({})


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Return all runs in these folders, the best first, those without an evaluation last.

    Raises:
        UserError: a folder is missing, or none has a run in it.
    """
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a folder: give the folder of a run, of a sweep, or of many runs")
    folders = list(dict.fromkeys(folder for path in paths for folder in _runs_in(path)))
    common = common_folder(paths if len(folders) > 1 else [folder.absolute().parent for folder in folders] or paths)
    records = [record for folder in folders if (record := _read(folder, common)) is not None]
    if not records:
        raise UserError(f"no run in {', '.join(map(str, paths))}: a run has a metrics.jsonl")
    return sorted(records, key=lambda record: (record.figures["best"] or math.inf, record.name))


def common_folder(paths: Sequence[Path]) -> Path:
    """Return the deepest folder that contains all of them, or is one of them."""
    return Path(os.path.commonpath([path.absolute() for path in paths]))


def _runs_in(path: Path) -> Iterator[Path]:
    """Yield the run at this path, or those below it. Links to folders are not followed."""
    for folder, inside, files in os.walk(path):
        inside.sort()
        if "metrics.jsonl" in files:
            inside.clear()
            yield Path(folder)


def _read(folder: Path, common: Path) -> Record | None:
    try:
        file_size(folder / "metrics.jsonl")  # raises if it is not a regular file
        lines = read_metrics(folder / "metrics.jsonl")
    except (UserError, OSError) as error:
        warn(f"skipping {folder}: {error}")
        return None
    try:
        stored = decode(_Stored, read_json(folder / "config.json"))
    except UserError as error:
        warn(f"the settings of {folder} are unknown: {error}")
        stored = decode(_Stored, {})
    train, val = _points(lines, _number(stored.environment.get("flops_per_token")))
    known = {"max_steps": stored.config.get("max_steps"), "n_params": stored.environment.get("n_params")}
    figures = {**{key: _number(value) for key, value in known.items()}, **_figures(train, val)}
    settings = {key: value for key, (value, _) in differences(stored.config, {}).items()}
    return Record(printable(os.path.relpath(folder.absolute(), common)), settings, _thinned(train), val, figures)


def _points(lines: list[dict[str, Any]], flops_per_token: float | None) -> tuple[list[Point], list[Point]]:
    """Return the points of training and of evaluations.

    Seconds count training alone, from the rate in each line: without evaluations, saves and breaks.
    """
    train, val = [], []
    seconds, timed_tokens = 0.0, 0.0
    for line in lines:
        numbers = {key: number for key, value in line.items() if (number := _number(value)) is not None}
        if not numbers.keys() >= {"step", "tokens"} or "event" in line:
            continue
        tokens, rate = numbers["tokens"], numbers.get("tokens_per_second", 0.0)
        if rate > 0 and tokens > timed_tokens:
            seconds, timed_tokens = seconds + (tokens - timed_tokens) / rate, tokens
        flops = None if flops_per_token is None else _number(tokens * flops_per_token)
        place = {"step": numbers["step"], "tokens": tokens, "flops": flops, "seconds": _number(seconds) or None}
        if "loss" in numbers:
            train.append({**place, "loss": numbers["loss"], "rate": numbers.get("tokens_per_second")})
        if "val_loss" in numbers:
            val.append({**place, "val_loss": numbers["val_loss"], "bits": numbers.get("val_bits_per_byte")})
    return train, val


def _figures(train: list[Point], val: list[Point]) -> Point:
    last: Point = max((points[-1] for points in (train, val) if points), key=lambda point: point["step"], default={})
    best: Point = min(val, key=lambda point: point["val_loss"], default={})
    rates = sorted(point["rate"] for point in train if point["rate"] is not None)
    return {
        **{key: last.get(key) for key in ("step", "tokens", "flops", "seconds")},
        "best": best.get("val_loss"),
        "best_step": best.get("step"),
        "bits": best.get("bits"),
        "loss": _mean(train[-max(1, len(train) // 20) :]) if train else None,
        "rate": rates[len(rates) // 2] if rates else None,
    }


def _thinned(points: list[Point]) -> list[Point]:
    """Average runs of consecutive points, so that at most _MOST_POINTS are left, each at the place of its last."""
    size = math.ceil(len(points) / _MOST_POINTS) or 1
    groups = (points[i : i + size] for i in range(0, len(points), size))
    return [{**group[-1], "loss": _mean(group)} for group in groups]


def _mean(points: list[Point]) -> float:
    return sum(point["loss"] / len(points) for point in points)  # a sum of huge losses would overflow


def _number(value: Any) -> float | None:
    """Return a finite number as a float, and None for anything else: true, a string, too large an integer."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def varying_settings(records: Sequence[Record]) -> list[str]:
    """Return the settings in which the runs differ: first those that change what is learned, and have most values."""
    keys = dict.fromkeys(itertools.chain.from_iterable(record.settings for record in records))
    values = {key: {printable(json.dumps(record.settings.get(key))) for record in records} for key in keys}
    varying = [key for key in keys if len(values[key]) > 1 and key not in _NOT_COMPARED]
    return sorted(varying, key=lambda key: (key.startswith(_COMPARED_LAST), -len(values[key]), key))


def shown(value: Any) -> float | str:
    """Return a setting as an axis and a table need it: a number, or a text of one line."""
    if (number := _number(value)) is not None:
        return number
    return printable(value if isinstance(value, str) else json.dumps(value))


def labels(records: Sequence[Record], keys: Sequence[str]) -> list[str]:
    """Return short names: the settings in which the runs differ, or their folders if the settings are not enough."""
    short = [", ".join(f"{key.rpartition('.')[2]}={brief(r.settings.get(key))}" for key in keys) for r in records]
    return short if keys and len(set(short)) == len(short) and max(map(len, short)) <= 80 else [r.name for r in records]


def brief(value: Any) -> str:
    """Return a setting as a short text."""
    given = shown(value)
    return f"{given:g}" if isinstance(given, float) else given


def printable(value: str) -> str:
    """Return a text that can be encoded and is a single line, whatever the file or its name contains."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in value)[:300]
