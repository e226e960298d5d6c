"""Fits L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, approach 3) to the losses of runs.

N is a model's parameters, D the tokens that it was trained on, L its loss in nats per token.
"""

import csv as tables
import itertools
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray
from pydantic import Field

from common.console import count, say, warn
from common.figures import png, short_count
from common.files import make_directory, refuse_foreign, write_atomic, write_json
from common.settings import UserError
from common.words import Items, options_of
from tools.report.records import read_records

Array = NDArray[np.float64]

HUBER = 1e-3
"""Differences of log L above this count linearly, not squared (Hoffmann et al. 2022)."""
LEAST_RUNS = 7
"""Two more than the law has constants."""
_ITERATIONS = 100
_SMALLEST = 1e-3  # exponent


class Law(NamedTuple):
    """The constants of one law, or arrays of them."""

    E: Array
    A: Array
    alpha: Array
    B: Array
    beta: Array

    def loss(self, N: float | Array, D: float | Array) -> Array:
        """The loss of a model of N parameters after D tokens."""
        return self.E + self.A / N**self.alpha + self.B / D**self.beta

    def tokens(self, N: float, loss: float) -> Array:
        """The tokens after which a model of N parameters has this loss; infinite if it never has."""
        left = loss - self.E - self.A / N**self.alpha
        with np.errstate(divide="ignore", over="ignore"):
            return np.where(
                left > 0, (self.B / np.maximum(left, 1e-300)) ** (1 / self.beta), np.inf
            )

    def best(self, flops: float) -> tuple[Array, Array]:
        """Parameters and tokens of the lowest loss for 6 N D floating-point operations."""
        G = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        N = G * (flops / 6) ** (self.beta / (self.alpha + self.beta))
        return N, flops / 6 / N


def fit(N: Array, D: Array, L: Array, resamples: int = 1000) -> tuple[Law, Law]:
    """Fit the law to runs, and to samples of them drawn with replacement (the bootstrap).

    Args:
        N, D, L: parameters, tokens and loss of each run.
        resamples: number of samples. Their laws show how much the fit depends on which runs there are.

    Returns:
        The law, and the laws of the samples.

    Raises:
        UserError: the runs do not determine a law.
    """
    _check(N, D, L)
    n, d, y = np.log(N) - np.log(N).mean(), np.log(D) - np.log(D).mean(), np.log(L)
    starts = np.array(
        [
            _start(y, *start)
            for start in itertools.product((0.2, 0.5, 0.8), (0.2, 0.5, 0.8), (0.3, 0.9))
        ]
    )
    constants, objective = _minimize(starts, n, d, y, np.ones((len(starts), len(y))))
    best = constants[objective.argmin()]
    for what, exponent in (("size", best[1]), ("tokens", best[3])):
        if exponent <= _SMALLEST:
            raise UserError(f"no law fits these runs: their loss does not fall with {what}")
    counts = np.random.default_rng(1).multinomial(
        len(y), np.full(len(y), 1 / len(y)), size=resamples
    )
    samples, _ = _minimize(np.tile(best, (resamples, 1)), n, d, y, counts.astype(float))
    centre = np.log(N).mean(), np.log(D).mean()
    return _law(best, *centre), _law(samples.T, *centre)


def _check(N: Array, D: Array, L: Array) -> None:
    if len(L) < LEAST_RUNS:
        raise UserError(f"a scaling law needs at least {LEAST_RUNS} runs, not {len(L)}")
    sizes, lengths = len(set(N)), len(set(D))
    if min(sizes, lengths) < 3:
        raise UserError(
            f"the runs have {sizes} sizes and {lengths} numbers of tokens: train 3 or more of each"
        )
    if abs(np.corrcoef(np.log(N), np.log(D))[0, 1]) > 0.99:
        raise UserError(
            "tokens and size vary together in these runs, so a law cannot separate them: vary both"
        )


def _start(y: Array, alpha: float, beta: float, share: float) -> list[float]:
    """Return initial constants: `share` of the lowest loss is irreducible; size and tokens cause half the rest each."""
    rest = y.mean() + np.log(max(1 - share, 0.05) / 2)
    return [rest, alpha, rest, beta, y.min() + np.log(share)]


def _terms(constants: Array, n: Array, d: Array) -> Array:
    """The logarithms of the law's three terms, (laws, runs, 3)."""
    a, alpha, b, beta, e = (column[:, None] for column in constants.T)
    return np.stack([a - alpha * n, b - beta * d, e + 0 * n], axis=-1)


def _minimize(constants: Array, n: Array, d: Array, y: Array, counts: Array) -> tuple[Array, Array]:
    """Minimize the Huber loss of many laws at once, by the method of Levenberg and Marquardt.

    Args:
        constants: (laws, 5), where to start.
        counts: (laws, runs), how often each run counts.

    Returns:
        Constants, and the objective of each law.
    """

    def objective(constants: Array) -> tuple[Array, Array]:
        residual = np.logaddexp.reduce(_terms(constants, n, d), axis=-1) - y
        size = np.abs(residual)
        huber = np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
        return (counts * huber).sum(1), residual

    damping = np.full(len(constants), 1e-2)
    value, residual = objective(constants)
    for _ in range(_ITERATIONS):
        terms = _terms(constants, n, d)
        share = np.exp(terms - np.logaddexp.reduce(terms, axis=-1, keepdims=True))
        w_n, w_d, w_e = np.moveaxis(share, -1, 0)
        jacobian = np.stack([w_n, -w_n * n, w_d, -w_d * d, w_e], axis=-1)  # (laws, runs, 5)
        weights = counts * np.minimum(1, HUBER / np.maximum(np.abs(residual), 1e-300))
        normal = np.einsum("lrp,lr,lrq->lpq", jacobian, weights, jacobian)
        gradient = np.einsum("lrp,lr,lr->lp", jacobian, weights, residual)
        scale = damping[:, None] * (np.einsum("lpp->lp", normal) + 1e-12)
        step = np.linalg.solve(normal + scale[..., None] * np.eye(5), gradient[..., None])[..., 0]
        tried = constants - step
        tried[:, [1, 3]] = tried[:, [1, 3]].clip(
            _SMALLEST, 5
        )  # the loss falls with size and with tokens
        tried_value, tried_residual = objective(tried)
        better = tried_value < value
        constants = np.where(better[:, None], tried, constants)
        value, residual = (
            np.where(better, tried_value, value),
            np.where(better[:, None], tried_residual, residual),
        )
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-12, 1e12)
    return constants, value


def _law(constants: Array, log_n: float, log_d: float) -> Law:
    a, alpha, b, beta, e = constants
    return Law(np.exp(e), np.exp(a + alpha * log_n), alpha, np.exp(b + beta * log_d), beta)


_TRAIN = Path(__file__).parents[1] / "train.py"
_TOKENS_PER_PARAMETER = 20  # near the optimum of Hoffmann et al. 2022
_NEAR = (
    10  # an extrapolation to more than this times the largest run gives the order of magnitude only
)
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
        raise UserError(
            "no runs are given: give ladder='OPTIONS of train.py', folders=runs/sweep, or csv=table.csv"
        )
    refuse_foreign(b'"law"', out / "scaling.json", out / "scaling.png")
    if loss is not None and parameters is None:
        raise UserError(f"loss={loss:g} needs parameters: give both")
    if ladder:
        folders = [*folders, _train(ladder, out / "runs")]
    rows = [*_trained(folders), *([] if csv is None else _read_csv(csv))]
    N, D, L = np.array(rows, dtype=float).reshape(-1, 3).T
    law, samples = fit(N, D, L, resamples)
    off = 100 * np.abs(np.log(law.loss(N, D) / L))
    say(
        f"{count(len(rows), 'run')}; the law is off by {np.median(off):.2g} % in the median, at most {off.max():.2g} %"
    )
    for name, value, sampled in zip(Law._fields, law, samples, strict=True):
        say(
            f"  {name:6} {value:.4g} ({' to '.join(f'{x:.4g}' for x in np.percentile(sampled, (5, 95)))})"
        )
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
        options = [*shlex.split(ladder), *options_of({"run_dir": str(folder)})]
    except ValueError as error:
        raise UserError(
            f"ladder={ladder}: {error}: give options of train.py, separated by spaces"
        ) from None
    if subprocess.run([sys.executable, _TRAIN, "-m", *options]).returncode:
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
        if (
            not evaluations
            or evaluations[-1]["step"] != run.figures["max_steps"]
            or n_params is None
        ):
            unfinished += 1
        else:
            rows.append((n_params, evaluations[-1]["tokens"], evaluations[-1]["value"]))
            texts.add((run.settings.get("dataset_dir"), run.settings.get("model.n_vocab")))
    if len(texts) > 1:
        raise UserError(
            "the runs have different datasets or vocabularies, whose losses differ: fit each by itself"
        )
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
            raise UserError(
                f"{path}, line {i}: {', '.join(_COLUMNS)} should be positive numbers, one each"
            ) from None
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
        left.plot(
            D[size == N],
            L[size == N],
            "o",
            color=f"C{i}",
            label=f"{short_count(size, 0)} parameters",
        )
        left.plot(tokens, law.loss(size, tokens), color=f"C{i}", linewidth=1)
    left.set(
        xscale="log",
        xlabel="tokens D",
        ylabel="validation loss (nats per token)",
        title="Runs, and the law",
    )
    left.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_formatter=NullFormatter())
    left.xaxis.set_major_formatter(short_count)
    left.legend()
    C = np.geomspace((6 * N * D).min(), (6 * N * D).max() * 10)
    right.plot(C, [law.loss(*law.best(c)) for c in C], label="lowest loss by the law")
    right.plot(6 * N * D, L, ".", color="dimgray", label="runs")
    right.set(
        xscale="log",
        xlabel="training operations, 6 N D",
        title="The lowest loss for a number of operations",
    )
    right.xaxis.set_major_formatter("{x:.0e}")
    right.legend()
    return png(figure)
