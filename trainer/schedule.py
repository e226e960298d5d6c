"""Learning-rate schedules: pure functions of the step, from 0 to max_steps - 1.

Each returns a factor of `optim.max_lr`, so that a sweep over max_lr scales the whole curve.
"""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from common.settings import Settings

Share = Annotated[float, Field(gt=0, lt=1)]


class _Schedule(Settings):
    """The base of all schedules: linear warm-up, then what `after_warmup` says."""

    longer: ClassVar[str | None] = "start a run of that length in another run_dir"
    """How to train longer than a finished run without a jump of the rate; None: by max_steps."""
    warmup_steps: Annotated[int, Field(ge=0)] | Share
    """Steps until the maximum; a number between 0 and 1: this share of the run."""

    def warmup(self, max_steps: int) -> int:
        """Steps until the maximum in a run of max_steps: a tenth if warmup_steps do not fit."""
        if 0 < self.warmup_steps < 1:
            return max(1, round(self.warmup_steps * max_steps))
        steps = int(self.warmup_steps)
        return steps if steps <= max_steps else max(1, max_steps // 10)

    def factor(self, step: int, max_steps: int) -> float:
        """Factor of the maximum at `step`."""
        warmup = self.warmup(max_steps)
        return (step + 1) / warmup if step < warmup else self.after_warmup(step, max_steps)

    def after_warmup(self, step: int, max_steps: int) -> float:
        """Factor of the maximum at a step after the warm-up."""
        return 1.0

    def falls_after(self, max_steps: int) -> int:
        """Steps before the factor begins to fall."""
        return self.warmup(max_steps)


class OneCycle(_Schedule, defaults="schedule/one_cycle"):
    """Rise to the maximum in warmup_steps, then fall to the end, by cosines (Smith & Topin 2018).

    The published model's schedule. Equal to torch's OneCycleLR with pct_start = warmup_steps /
    max_steps, div_factor = 1 / start and final_div_factor = start / end.
    """

    name: Literal["one_cycle"]
    warmup_steps: Annotated[int, Field(gt=0)] | Share
    """Steps until the maximum; a number below 1: this share of the run."""
    start: float = Field(gt=0, le=1)
    """First learning rate, as a factor of the maximum."""
    end: float = Field(ge=0, le=1)
    """Last learning rate, as a factor of the maximum."""

    def factor(self, step: int, max_steps: int) -> float:
        peak = self.warmup(max_steps) - 1
        if step < peak:
            return _cosine(self.start, 1.0, step / peak)
        return _cosine(1.0, self.end, _progress(step, peak, max_steps - 1))


class Cosine(_Schedule, defaults="schedule/cosine"):
    """Linear warm-up from 0, then half a cosine down to `end`."""

    name: Literal["cosine"]
    end: float = Field(ge=0, le=1)
    """Last learning rate, as a factor of the maximum."""

    def after_warmup(self, step: int, max_steps: int) -> float:
        return _cosine(1.0, self.end, _progress(step, self.warmup(max_steps), max_steps - 1))


class WSD(_Schedule, defaults="schedule/wsd"):
    """Linear warm-up, constant phase, linear decay (Hu et al. 2024).

    The constant phase can be extended at any time.
    """

    longer = "continue a copy of the run from a checkpoint before the decay (docs/training.md)"
    name: Literal["wsd"]
    decay: float = Field(gt=0, le=1)
    """Length of the decay, as a fraction of max_steps; 1: from the end of the warm-up."""
    end: float = Field(ge=0, le=1)
    """Last learning rate, as a factor of the maximum."""

    def after_warmup(self, step: int, max_steps: int) -> float:
        progress = _progress(step, self.falls_after(max_steps), max_steps - 1)
        return 1.0 + (self.end - 1.0) * progress

    def falls_after(self, max_steps: int) -> int:
        return max(self.warmup(max_steps), max_steps - 1 - round(self.decay * max_steps))


class Constant(_Schedule, defaults="schedule/constant"):
    """Linear warm-up, then constant."""

    longer = None
    name: Literal["constant"]

    def falls_after(self, max_steps: int) -> int:
        return max_steps


ScheduleConfig = Annotated[OneCycle | Cosine | WSD | Constant, Field(discriminator="name")]


def _progress(step: int, first: int, last: int) -> float:
    """How far `step` is from `first` to `last`, between 0 and 1."""
    return min(max((step - first) / max(last - first, 1), 0.0), 1.0)


def _cosine(a: float, b: float, progress: float) -> float:
    return b + (a - b) / 2 * (1 + math.cos(math.pi * progress))
