"""Detects steps that must not change the weights, and symptoms that a person should know of."""

import math
from collections.abc import Iterable

from torch import Tensor

from common.console import warn
from common.settings import JsonDict
from runtime.distributed import World
from runtime.state import RECENT_LOSSES, LossStatistics

_MANY = 20
"""Steps in a row that make a warning."""


def why_bad(
    loss: float, grad_norm: float, statistics: LossStatistics, spike_sigmas: float | None
) -> str | None:
    """Return why a step must not change the weights, or None; the same in all processes."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return f"loss is {loss} and the gradient's norm {grad_norm}"
    if spike_sigmas is not None and statistics.count >= RECENT_LOSSES:
        limit = statistics.mean + spike_sigmas * math.sqrt(statistics.variance)
        if loss > limit:
            distance = f"{spike_sigmas:g} standard deviations over the mean"
            return f"loss is {loss:.4f}, above {limit:.4f}: {distance}"
    return None


def first_not_finite(named: Iterable[tuple[str, Tensor]], world: World) -> list[str]:
    """Names of the first three parameters whose gradient is not finite. All processes call this."""
    names = []
    for name, p in named:
        if p.grad is not None and not world.unshard(p.grad).isfinite().all():
            names.append(name)
    return names[:3]


class Symptoms:
    """Warns, once each, of a diverging loss and of many steps that need the exact log attention.

    A loss diverges if it is above that of uniform guessing by 1 nat for many steps, or ten times as
    high, without a fall.
    """

    def __init__(self, n_vocab: int, max_lr: float) -> None:
        self._uniform = math.log(n_vocab)
        self._max_lr = max_lr
        self._losses: list[float] = []  # of the last steps, while they are high
        self._exact = 0  # steps in a row that had exact tiles
        self._said: set[str] = set()

    def take(self, line: JsonDict) -> None:
        """Look at a line of metrics.jsonl."""
        if "loss" not in line:
            return
        loss = line["loss"]
        step = f"step {line['step']:,}"
        self._losses = [*self._losses[-_MANY:], loss] if loss > self._uniform + 1 else []
        n_steps = 1 if loss > 10 * self._uniform else _MANY
        if len(self._losses) > n_steps and loss >= self._losses[0]:
            what = f"the loss, {loss:,.2f} in {step}, is far above that of guessing"
            remedy = f"start again with optim.max_lr below {self._max_lr:g}"
            self._say("loss", f"{what}, {self._uniform:.2f}: training diverges; {remedy}")
        self._exact = self._exact + 1 if "exact_tiles" in line else 0
        if self._exact > _MANY:
            what = f"log attention computed tiles again in the last {_MANY} steps"
            what += f", {line['exact_tiles']:,} in {step}"
            self._say("tiles", f"{what}: scores are far apart, and such steps are slow")

    def _say(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warn(message)
