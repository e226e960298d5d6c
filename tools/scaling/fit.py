"""Fits L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, approach 3) to the losses of runs.

N is a model's parameters, D the tokens that it was trained on, L its loss in nats per token.
"""

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.settings import UserError

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
            return np.where(left > 0, (self.B / np.maximum(left, 1e-300)) ** (1 / self.beta), np.inf)

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
    starts = np.array([_start(y, *start) for start in itertools.product((0.2, 0.5, 0.8), (0.2, 0.5, 0.8), (0.3, 0.9))])
    constants, objective = _minimize(starts, n, d, y, np.ones((len(starts), len(y))))
    best = constants[objective.argmin()]
    for what, exponent in (("size", best[1]), ("tokens", best[3])):
        if exponent <= _SMALLEST:
            raise UserError(f"no law fits these runs: their loss does not fall with {what}")
    counts = np.random.default_rng(1).multinomial(len(y), np.full(len(y), 1 / len(y)), size=resamples)
    samples, _ = _minimize(np.tile(best, (resamples, 1)), n, d, y, counts.astype(float))
    centre = np.log(N).mean(), np.log(D).mean()
    return _law(best, *centre), _law(samples.T, *centre)


def _check(N: Array, D: Array, L: Array) -> None:
    if len(L) < LEAST_RUNS:
        raise UserError(f"a scaling law needs at least {LEAST_RUNS} runs, not {len(L)}")
    if min(len(set(N)), len(set(D))) < 3:
        raise UserError(
            f"the runs have {len(set(N))} sizes and {len(set(D))} numbers of tokens: train 3 or more of each"
        )
    n, d = np.log(N), np.log(D)
    if abs(np.corrcoef(n, d)[0, 1]) > 0.99:
        raise UserError("tokens and size vary together in these runs, so a law cannot separate them: vary both")


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
        tried[:, [1, 3]] = tried[:, [1, 3]].clip(_SMALLEST, 5)  # the loss falls with size and with tokens
        tried_value, tried_residual = objective(tried)
        better = tried_value < value
        constants = np.where(better[:, None], tried, constants)
        value, residual = np.where(better, tried_value, value), np.where(better[:, None], tried_residual, residual)
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-12, 1e12)
    return constants, value


def _law(constants: Array, log_n: float, log_d: float) -> Law:
    a, alpha, b, beta, e = constants
    return Law(np.exp(e), np.exp(a + alpha * log_n), alpha, np.exp(b + beta * log_d), beta)
