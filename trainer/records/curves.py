"""A run's curves, and their picture, loss.png."""

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.figures import draw_or_warn, encode_png, format_count
from common.files import write_or_warn
from common.numbers import ceil_div
from common.settings import JsonDict

# Colours: of each step's loss, of their means, and of validation.
_STEP = "C5"
_MEAN = "C0"
_VAL = "C1"
_MOST_DOTS = 60
_MOST_BINS = 1000


class Bin(NamedTuple):
    """Consecutive losses."""

    tokens: int
    """After the last of them."""
    n_losses: int
    mean: float
    low: float
    high: float


class Curve:
    """Losses over tokens, one for each step."""

    def __init__(self) -> None:
        self._tokens = array("q")
        self._losses = array("d")

    def add(self, tokens: int, loss: float) -> None:
        """Add the next loss."""
        self._tokens.append(tokens)
        self._losses.append(loss)

    def bins(self) -> list[Bin]:
        """Return at most 1,000 bins of equally many losses; the last bin may have fewer."""
        size = max(1, ceil_div(len(self._losses), _MOST_BINS))
        bins = []
        for start in range(0, len(self._losses), size):
            losses = self._losses[start : start + size]
            tokens = self._tokens[start + len(losses) - 1]
            bins.append(Bin(tokens, len(losses), fmean(losses), min(losses), max(losses)))
        return bins


def smoothed(bins: Sequence[Bin]) -> list[float]:
    """Return for each bin the mean of the 2 % of a curve that end with it."""
    width = max(1, len(bins) // 50)
    means = []
    for end in range(1, len(bins) + 1):
        window = bins[max(0, end - width) : end]
        means.append(fmean([bin.mean for bin in window], [bin.n_losses for bin in window]))
    return means


class RunCurves:
    """The losses in metrics.jsonl as curves over tokens."""

    def __init__(self, lines: Iterable[JsonDict] = ()) -> None:
        self.loss = Curve()
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


def draw_losses(curves: RunCurves, path: Path, name: str, suffix: str = "") -> None:
    """Draw training and validation loss over tokens into a PNG file. A failure is a warning.

    Args:
        suffix: what follows the word loss: " on answers" or nothing.
    """
    picture = draw_or_warn(str(path), lambda: _picture(curves, name, suffix))
    if picture is not None:
        write_or_warn(path, picture)


def _picture(curves: RunCurves, name: str, suffix: str) -> bytes:
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    title = name
    # The losses of steps: their range as a band, and their mean as a line.
    bins = curves.loss.bins()
    means = smoothed(bins)
    tokens = [bin.tokens for bin in bins]
    lows = [bin.low for bin in bins]
    if bins:
        highs = [bin.high for bin in bins]
        axes.fill_between(
            tokens, lows, highs, color=_STEP, alpha=0.5, linewidth=0.8, label="training, every step"
        )
        axes.plot(
            tokens,
            means,
            color=_MEAN,
            marker="o" if len(means) == 1 else "",
            label="training, mean",
        )
        title = f"training loss {means[-1]:.4f} nats per token{suffix}: {name}"
    # The losses of evaluations, as dots while there are few.
    if curves.val:
        marker = "o" if len(curves.val) <= _MOST_DOTS else ""
        axes.plot(*zip(*curves.val, strict=True), color=_VAL, marker=marker, label="validation")
        title = f"validation loss {curves.val[-1][1]:.4f} nats per token{suffix}: {name}"
    # The title has the last loss, and the axis leaves out the first fall.
    axes.set_title(title)
    points = [*zip(tokens, means, strict=True), *curves.val]
    if points:
        set_limits(axes, points, lows)
        axes.legend(loc="upper right")
    axes.set_xlabel("tokens")
    axes.set_ylabel(f"loss{suffix} (nats per token)")
    axes.xaxis.set_major_formatter(format_count)
    return encode_png(figure)


def set_limits(axes: Axes, points: Sequence[tuple[int, float]], lows: Sequence[float] = ()) -> None:
    """Show all losses of points (tokens, loss), and `lows`; those of the first fall may not fit."""
    if not points:
        return
    first_fall = 0.05 * max(points)[0]
    later = [loss for tokens, loss in points if tokens >= first_fall]
    low = min([*later, *lows])
    high = max(later)
    margin = 0.08 * (high - low) or 0.05  # a single loss has no range
    axes.set_ylim(low - margin, high + margin)
