"""A run's curves, short enough to keep and to draw however long the run is; loss.png."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.figures import drawn, png, short_count
from common.files import write_or_warn
from common.settings import JsonDict

_EACH, _MEAN, _VAL = "C5", "C0", "C1"
_MOST_DOTS = 60


@dataclass(slots=True)
class Bin:
    """Consecutive values of a curve."""

    place: Any
    """Where the last of them is."""
    count: int
    mean: float
    low: float
    high: float

    def append(self, after: "Bin") -> None:
        """Merge the bin that follows into this one."""
        self.place = after.place
        self.count += after.count
        share = after.count / self.count
        # A sum of huge losses would overflow.
        self.mean = self.mean * (1 - share) + after.mean * share
        self.low = min(self.low, after.low)
        self.high = max(self.high, after.high)


class Curve:
    """Values in order, as at most `most` bins (an even number) of equally many values.

    The last bin may have fewer.
    """

    def __init__(self, most: int) -> None:
        self.bins: list[Bin] = []
        self._most = most
        self._size = 1  # values of a bin

    def add(self, place: Any, value: float) -> None:
        """Add the next value."""
        new = Bin(place, 1, value, value, value)
        if self.bins and self.bins[-1].count < self._size:
            return self.bins[-1].append(new)
        if len(self.bins) == self._most:
            for first, second in zip(self.bins[::2], self.bins[1::2], strict=True):
                first.append(second)
            del self.bins[1::2]
            self._size *= 2
        self.bins.append(new)

    def smoothed(self, share: float) -> list[float]:
        """For each bin, the mean of as many up to it as are `share` of the curve."""
        width = max(1, int(len(self.bins) * share))
        means = []
        for end in range(1, len(self.bins) + 1):
            window = self.bins[max(0, end - width) : end]
            means.append(fmean([bin.mean for bin in window], [bin.count for bin in window]))
        return means


class RunCurves:
    """The losses in metrics.jsonl as curves over tokens."""

    def __init__(self, lines: Iterable[JsonDict] = ()) -> None:
        self.loss = Curve(1000)
        self.val: list[tuple[int, float]] = []
        """Tokens and validation loss of every evaluation."""
        self.samples: list[tuple[int, str]] = []
        """Step and text of every sample."""
        self.rate: tuple[int, float] | None = None
        """The last step of training, and its learning rate."""
        for line in lines:
            self.add(line)

    def add(self, line: JsonDict) -> None:
        """Add a line; events are ignored."""
        if "loss" in line and "event" not in line:
            self.loss.add(line["tokens"], line["loss"])
            if isinstance(line.get("lr"), float):
                self.rate = line["step"], line["lr"]
        elif "val_loss" in line:
            self.val.append((line["tokens"], line["val_loss"]))
            if "sample" in line:
                self.samples.append((line["step"], line["sample"]))


def draw_losses(curves: RunCurves, path: Path, name: str, of: str = "") -> None:
    """Draw training and validation loss over tokens into a PNG file. A failure is a warning.

    Args:
        of: what the loss is of, " on answers" or nothing.
    """
    picture = drawn(str(path), lambda: _picture(curves, name, of))
    if picture is not None:
        write_or_warn(path, picture)


def _picture(curves: RunCurves, name: str, of: str) -> bytes:
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    title = name
    bins = curves.loss.bins
    means = curves.loss.smoothed(0.02)
    tokens = [bin.place for bin in bins]
    lows = [bin.low for bin in bins]
    if bins:
        highs = [bin.high for bin in bins]
        axes.fill_between(
            tokens, lows, highs, color=_EACH, alpha=0.5, linewidth=0.8, label="training, every step"
        )
        axes.plot(
            tokens,
            means,
            color=_MEAN,
            marker="o" if len(means) == 1 else "",
            label="training, mean",
        )
        title = f"training loss {means[-1]:.4f} nats per token{of}: {name}"
    if curves.val:
        marker = "o" if len(curves.val) <= _MOST_DOTS else ""
        axes.plot(*zip(*curves.val, strict=True), color=_VAL, marker=marker, label="validation")
        title = f"validation loss {curves.val[-1][1]:.4f} nats per token{of}: {name}"
    axes.set_title(title)
    if points := [*zip(tokens, means, strict=True), *curves.val]:
        set_limits(axes, points, lows)
        axes.legend(loc="upper right")
    axes.set_xlabel("tokens")
    axes.set_ylabel(f"loss{of} (nats per token)")
    axes.xaxis.set_major_formatter(short_count)
    return png(figure)


def set_limits(axes: Axes, points: Sequence[tuple[int, float]], lows: Sequence[float] = ()) -> None:
    """Show all losses of (tokens, loss), and `lows`, but those of the first fall."""
    if not points:
        return
    first_fall = 0.05 * max(points)[0]
    later = [loss for tokens, loss in points if tokens >= first_fall]
    low, high = min([*later, *lows]), max(later)
    margin = 0.08 * (high - low) or 0.05  # a single loss has no range
    axes.set_ylim(low - margin, high + margin)
