"""Draws loss.png."""

import contextlib
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.console import warn
from common.figures import png, short_count
from common.files import write_atomic
from trainer.curves import RunCurves

_EACH, _MEAN, _VAL = "C5", "C0", "C1"
_MOST_DOTS = 60


def draw_losses(curves: RunCurves, path: Path, name: str) -> None:
    """Draw training and validation loss over tokens. Only warns if the picture cannot be written."""
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    title, above, stretches = name, _limit(axes, curves), curves.loss.stretches
    if stretches:
        tokens, means = [stretch.place for stretch in stretches], curves.loss.smoothed(0.02)
        lows, highs = [stretch.low for stretch in stretches], [stretch.high for stretch in stretches]
        each = f"training, every step{above}"
        if lows == highs:  # as many stretches as steps
            axes.plot(tokens, highs, color=_EACH, linewidth=0.8, label=each)
        else:
            axes.fill_between(tokens, lows, highs, color=_EACH, alpha=0.5, linewidth=0, label=each)
        axes.plot(tokens, means, color=_MEAN, label="training, mean")
        title = f"training loss {means[-1]:.4f} nats per token: {name}"
    if curves.val:
        marker = "o" if len(curves.val) <= _MOST_DOTS else ""
        axes.plot(*zip(*curves.val, strict=True), color=_VAL, marker=marker, label="validation")
        title = f"validation loss {curves.val[-1][1]:.4f} nats per token: {name}"
    axes.set_title(title)
    if curves.val or stretches:
        axes.legend(loc="upper right")
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_formatter(short_count)
    try:
        write_atomic(path, png(figure))
    except OSError as error:
        with contextlib.suppress(OSError):
            path.with_name(path.name + ".tmp").unlink()
        warn(f"{path} could not be redrawn ({error.strerror or error})")


def _limit(axes: Axes, curves: RunCurves) -> str:
    """Fit the axis to the means after the first fall, and return what is above it, for the legend."""
    stretches, means = curves.loss.stretches, curves.loss.smoothed(0.02)
    points = [(stretch.place, mean) for stretch, mean in zip(stretches, means, strict=True)] + curves.val
    if not points:
        return ""
    last = max(tokens for tokens, _ in points)
    later = [loss for tokens, loss in points if tokens >= 0.05 * last]
    low, high = min([*later, *(stretch.low for stretch in stretches)]), max(later)
    margin = 0.08 * (high - low) or 0.05  # a single loss has no range
    axes.set_ylim(low - margin, high + margin)
    highest = max([*(stretch.high for stretch in stretches), *(loss for _, loss in curves.val)])
    return f" (up to {highest:.4g}, above this picture)" if highest > high + margin else ""
