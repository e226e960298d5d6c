"""Reads the runs, and says and draws what the law that fits them predicts."""

import csv as tables
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from pydantic import Field

from common.console import count, say, warn
from common.figures import png, short_count
from common.files import make_directory, refuse_foreign, write_atomic, write_json
from common.settings import UserError
from common.words import Items, options_of
from tools.report.records import read_records
from tools.scaling.fit import Array, Law, fit

_TRAIN = Path(__file__).parents[2] / "train.py"
_TOKENS_PER_PARAMETER = 20  # near the optimum of Hoffmann et al. 2022
_NEAR = 10  # an extrapolation to more than this times the largest run gives the order of magnitude only
_MOST_CURVES = 10  # more would hide each other
_COLUMNS = ("parameters", "tokens", "loss")


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def run(
    folders: Items[Path],
    csv: Path | None,
    out: Path,
    resamples: Annotated[int, Field(ge=100, le=100_000)],
    ladder: str = "",
    parameters: Positive | None = None,
    loss: Positive | None = None,
) -> None:
    """Train the ladder, if there is one, fit the law, print and draw it, and write scaling.json.

    Raises:
        UserError: the runs do not determine a law, a run failed, or an option is missing.
    """
    if not (folders or csv or ladder):
        raise UserError("no runs are given: give ladder='OPTIONS of train.py', folders=runs/sweep, or csv=table.csv")
    refuse_foreign(b'"law"', out / "scaling.json", out / "scaling.png")
    if loss is not None and parameters is None:
        raise UserError(f"loss={loss:g} needs parameters: give both")
    if ladder:
        folders = [*folders, _train(ladder, out / "runs")]
    rows = [*_trained(folders), *([] if csv is None else _read_csv(csv))]
    N, D, L = np.array(rows, dtype=float).reshape(-1, 3).T
    law, samples = fit(N, D, L, resamples)
    off = 100 * np.abs(np.log(law.loss(N, D) / L))
    say(f"{count(len(rows), 'run')}; the law is off by {np.median(off):.2g} % in the median, at most {off.max():.2g} %")
    for name, value, sampled in zip(Law._fields, law, samples, strict=True):
        say(f"  {name:6} {value:.4g} ({' to '.join(f'{x:.4g}' for x in np.percentile(sampled, (5, 95)))})")
    predictions = {}
    if parameters is not None:
        say(f"{parameters:.4g} parameters, {parameters / N.max():.3g} x the largest model:")
        for what, (tokens, values) in _predict(samples, parameters, loss).items():
            predictions[what] = [float(x) if np.isfinite(x) else None for x in values]
            say(f"  {what}: {_in_words(values, tokens / D.max(), parameters / N.max())}")
    make_directory(out, "out")
    constants = {name: float(value) for name, value in law._asdict().items()}
    write_json(out / "scaling.json", {"law": constants, "runs": rows, "predictions": predictions})
    write_atomic(out / "scaling.png", _draw(N, D, L, law))
    say(f"written: {out / 'scaling.json'}, {out / 'scaling.png'}")


def _train(ladder: str, folder: Path) -> Path:
    """Train all combinations of these options of train.py, as a sweep, which skips runs that have finished.

    Raises:
        UserError: an option is wrong, or a run failed.
    """
    try:
        options = shlex.split(ladder)
    except ValueError as error:
        raise UserError(f"ladder={ladder}: {error}: give options of train.py, separated by spaces") from None
    run_dir = options_of({"run_dir": str(folder)})
    if subprocess.run([sys.executable, _TRAIN, "-m", *options, *run_dir]).returncode:
        raise UserError(f"ladder={ladder}: training failed, see above; the same command continues")
    return folder


def _trained(folders: list[Path]) -> list[tuple[float, float, float]]:
    """Parameters, tokens and last validation loss of the finished runs.

    Raises:
        UserError: they have different datasets or vocabularies.
    """
    rows, unfinished, texts = [], 0, set()
    records = read_records(folders) if folders else []
    for run in (run for record in records for run in record.members or (record,)):
        evaluations, n_params = run.curves["val_loss"], run.figures["n_params"]
        if not evaluations or evaluations[-1]["step"] != run.figures["max_steps"] or n_params is None:
            unfinished += 1
        else:
            rows.append((n_params, evaluations[-1]["tokens"], evaluations[-1]["value"]))
            texts.add((run.settings.get("dataset_dir"), run.settings.get("model.n_vocab")))
    if len(texts) > 1:
        raise UserError("the runs have different datasets or vocabularies, whose losses differ: fit each by itself")
    if unfinished:
        warn(f"not finished, and left out: {count(unfinished, 'run')}")
    return rows


def _read_csv(path: Path) -> list[tuple[float, float, float]]:
    """The rows of a table with these columns, in any order.

    Raises:
        UserError: a column is missing, or a value is not a positive number.
    """
    rows = []
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    for i, row in enumerate(tables.DictReader(text.splitlines()), start=2):
        try:
            N, D, L = (float(row[column]) for column in _COLUMNS)
            if not 0 < min(N, D, L) <= max(N, D, L) < float("inf"):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{path}, line {i}: {', '.join(_COLUMNS)} should be positive numbers, one each") from None
        rows.append((N, D, L))
    return rows


def _predict(samples: Law, N: float, loss: float | None) -> dict[str, tuple[float, Array]]:
    """Return, by what is predicted, the tokens of that run, and percentiles 5, 50 and 95 of what the laws say."""
    D = _TOKENS_PER_PARAMETER * N
    found = {f"loss after {D:.3g} tokens": (D, _percentiles(samples.loss(N, D)))}
    if loss is not None:
        tokens = _percentiles(samples.tokens(N, loss))
        found[f"tokens to a loss of {loss:g}"] = (tokens[1], tokens)
    return found


def _percentiles(values: Array) -> Array:
    return np.percentile(values, (5, 50, 95), method="nearest")


def _in_words(values: Array, longer: float, larger: float) -> str:
    """Say a prediction. `longer` and `larger`: the run's tokens and parameters, relative to the most of the fit's."""
    low, middle, high = values
    if not np.isfinite(middle):
        return "never, by this law"
    if max(longer, larger) > _NEAR:
        far = "too far outside the runs for more than the order of magnitude"
        return f"{low:.1g} to {high:.1g}; {longer:.3g} x the longest run: {far}"
    return f"{middle:.4g} ({low:.4g} to {high:.4g}); {longer:.3g} x the longest run"


def _draw(N: Array, D: Array, L: Array, law: Law) -> bytes:
    """Draw loss over tokens for each size, and the lowest loss for a number of operations."""
    figure = Figure(figsize=(11, 4.6))
    left, right = figure.subplots(1, 2)
    tokens = np.geomspace(D.min() / 1.5, D.max() * 3)
    sizes = sorted(set(N))
    for i, size in enumerate(sizes[:: -(-len(sizes) // _MOST_CURVES)]):
        left.plot(D[size == N], L[size == N], "o", color=f"C{i}", label=f"{short_count(size, 0)} parameters")
        left.plot(tokens, law.loss(size, tokens), color=f"C{i}", linewidth=1)
    left.set(xscale="log", xlabel="tokens D", ylabel="validation loss (nats per token)", title="Runs, and the law")
    left.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_formatter=NullFormatter())
    left.xaxis.set_major_formatter(short_count)
    left.legend()
    C = np.geomspace((6 * N * D).min(), (6 * N * D).max() * 10)
    right.plot(C, [law.loss(*law.best(c)) for c in C], label="lowest loss by the law")
    right.plot(6 * N * D, L, ".", color="dimgray", label="runs")
    right.set(xscale="log", xlabel="training operations, 6 N D", title="The lowest loss for a number of operations")
    right.xaxis.set_major_formatter("{x:.0e}")
    right.legend()
    return png(figure)
