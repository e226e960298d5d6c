"""Detects steps that must not change the weights."""

import itertools
import math
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field
from torch import Tensor

from common.settings import Settings
from trainer.distributed import World

_MEMORY = 100
"""Approximate number of recent losses that the mean and the variance cover."""


class LossStatistics(Settings):
    """Running mean and variance of the losses of good steps."""

    count: Annotated[int, Field(ge=0)] = 0
    mean: float = 0.0
    variance: Annotated[float, Field(ge=0)] = 0.0

    def after(self, loss: float) -> "LossStatistics":
        """Statistics with one more loss. The first losses have equal weights; later, old ones decay exponentially."""
        weight = max(1 / (self.count + 1), 1 / _MEMORY)
        distance = loss - self.mean
        variance = (1 - weight) * (self.variance + weight * distance**2)
        return LossStatistics(count=self.count + 1, mean=self.mean + weight * distance, variance=variance)


def why_bad(loss: float, grad_norm: float, statistics: LossStatistics, spike_sigmas: float | None) -> str | None:
    """Return why a step must not change the weights, or None. Arguments are the same in all processes."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return f"loss is {loss} and the gradient's norm {grad_norm}"
    if spike_sigmas is not None and statistics.count >= _MEMORY:
        limit = statistics.mean + spike_sigmas * math.sqrt(statistics.variance)
        if loss > limit:
            return f"loss is {loss:.4f}, above {limit:.4f}: {spike_sigmas:g} standard deviations over the mean"
    return None


def in_a_row(step: int, skipped: dict[int, str]) -> int:
    """How many steps in a row right before `step` were skipped."""
    return next(n for n in itertools.count() if step - n - 1 not in skipped)


def first_not_finite(named: Iterable[tuple[str, Tensor]], world: World) -> list[str]:
    """Names of the first three parameters whose gradient is not finite. Every process must call this."""
    whole = ((name, world.unshard(p.grad)) for name, p in named if p.grad is not None)
    return [name for name, gradient in whole if not gradient.isfinite().all()][:3]
