"""A run's curves, short enough to keep and to draw however long the run is."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Place = TypeVar("Place")


@dataclass(slots=True)
class Stretch(Generic[Place]):
    """Consecutive values of a curve."""

    place: Place
    """Where the last of them is."""
    count: int
    mean: float
    low: float
    high: float

    def append(self, after: "Stretch[Place]") -> None:
        """Make this one stretch with the one that follows."""
        self.place, self.count = after.place, self.count + after.count
        share = after.count / self.count
        self.mean = self.mean * (1 - share) + after.mean * share  # a sum of huge losses would overflow
        self.low, self.high = min(self.low, after.low), max(self.high, after.high)


class Curve(Generic[Place]):
    """Values in order, as at most `most` stretches (an even number) of equally many values; the last may have fewer."""

    def __init__(self, most: int) -> None:
        self.stretches: list[Stretch[Place]] = []
        self._most, self._size = most, 1

    def add(self, place: Place, value: float) -> None:
        """Add the next value."""
        if self.stretches and self.stretches[-1].count < self._size:
            self.stretches[-1].append(Stretch(place, 1, value, value, value))
            return
        if len(self.stretches) == self._most:
            for first, second in zip(self.stretches[::2], self.stretches[1::2], strict=True):
                first.append(second)
            del self.stretches[1::2]
            self._size *= 2
        self.stretches.append(Stretch(place, 1, value, value, value))

    def smoothed(self, share: float) -> list[float]:
        """For each stretch, the mean of as many up to it as are `share` of the curve."""
        width = max(1, int(len(self.stretches) * share))
        windows = (self.stretches[max(0, end - width) : end] for end in range(1, len(self.stretches) + 1))
        return [mean_of(window) for window in windows]


def mean_of(stretches: Iterable[Stretch[Any]]) -> float:
    """Return the mean of all values in them; there must be one."""
    known = list(stretches)
    total = sum(one.count for one in known)
    return sum(one.mean * (one.count / total) for one in known)


@dataclass
class RunCurves:
    """The losses in metrics.jsonl as curves over tokens."""

    loss: Curve[int] = field(default_factory=lambda: Curve(1000))
    val: list[tuple[int, float]] = field(default_factory=list)
    """Tokens and validation loss of every evaluation."""

    def add(self, line: dict[str, Any]) -> None:
        """Add a line; events are ignored."""
        if "event" not in line and "loss" in line:
            self.loss.add(line["tokens"], line["loss"])
        elif "event" not in line:
            self.val.append((line["tokens"], line["val_loss"]))


def curves_of(lines: Iterable[dict[str, Any]]) -> RunCurves:
    """Return the curves of a run's lines."""
    curves = RunCurves()
    for line in lines:
        curves.add(line)
    return curves
