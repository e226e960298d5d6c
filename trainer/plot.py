"""Draws loss.png."""

import contextlib
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.console import warn
from common.figures import log_scale, png, short_count
from common.files import write_atomic
from trainer.curves import Curve, RunCurves

_EACH, _MEAN, _VAL = "C5", "C0", "C1"
_MOST_DOTS = 60


def draw_losses(curves: RunCurves, path: Path, name: str) -> None:
    """Draw training and validation loss over tokens, and learning rate and gradient norm below.

    Only warns if the picture cannot be written.
    """
    figure = Figure(figsize=(8, 7))
    losses, rates, norms = figure.subplots(3, 1, sharex=True, height_ratios=[4, 1, 1.4])
    title, above = name, _limit(losses, curves)
    if curves.loss.stretches:
        _draw(losses, curves.loss, 0.02, f"training, every step{above}", "training, mean")
        title = f"training loss {curves.loss.smoothed(0.02)[-1]:.4f} nats per token: {name}"
    if curves.val:
        marker = "o" if len(curves.val) <= _MOST_DOTS else ""
        losses.plot(*zip(*curves.val, strict=True), color=_VAL, marker=marker, label="validation")
        title = f"validation loss {curves.val[-1][1]:.4f} nats per token: {name}"
    losses.set_title(title)
    if curves.val or curves.loss.stretches:
        losses.legend(loc="upper right")
    _draw(rates, curves.lr, 0.0)
    _draw(norms, curves.grad_norm, 0.02)
    if any(stretch.low > 0 for stretch in curves.grad_norm.stretches):
        log_scale(norms)
    for axes, quantity in ((losses, "loss (nats per token)"), (rates, "learning rate"), (norms, "gradient norm")):
        axes.set_ylabel(quantity)
    figure.align_ylabels()
    norms.set_xlabel("tokens")
    norms.xaxis.set_major_formatter(short_count)
    try:
        write_atomic(path, png(figure))
    except OSError as error:
        with contextlib.suppress(OSError):
            path.with_name(path.name + ".tmp").unlink()
        warn(f"{path} could not be redrawn ({error.strerror or error})")


def _draw(axes: Axes, curve: Curve[int], share: float, each: str = "", mean: str = "") -> None:
    """Draw the range of the values and, over it, the mean of the last `share` of all values; with their labels."""
    places = [stretch.place for stretch in curve.stretches]
    lows, highs = [stretch.low for stretch in curve.stretches], [stretch.high for stretch in curve.stretches]
    if lows == highs:  # as many stretches as steps
        axes.plot(places, highs, color=_EACH, linewidth=0.8, label=each)
    else:
        axes.fill_between(places, lows, highs, color=_EACH, alpha=0.5, linewidth=0, label=each)
    axes.plot(places, curve.smoothed(share), color=_MEAN, label=mean)


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
