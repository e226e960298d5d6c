"""Draws loss.png."""

from pathlib import Path

from matplotlib.figure import Figure

from common.figures import png, short_count
from trainer.curves import RunCurves
from trainer.run_dir import write_or_warn

_EACH, _MEAN, _VAL = "C5", "C0", "C1"
_MOST_DOTS = 60


def draw_losses(curves: RunCurves, path: Path, name: str) -> None:
    """Draw training and validation loss over tokens. Only warns if the picture cannot be written."""
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    title, stretches, means = name, curves.loss.stretches, curves.loss.smoothed(0.02)
    tokens, lows = [stretch.place for stretch in stretches], [stretch.low for stretch in stretches]
    if stretches:
        highs = [stretch.high for stretch in stretches]
        axes.fill_between(tokens, lows, highs, color=_EACH, alpha=0.5, linewidth=0.8, label="training, every step")
        axes.plot(tokens, means, color=_MEAN, label="training, mean")
        title = f"training loss {means[-1]:.4f} nats per token: {name}"
    if curves.val:
        marker = "o" if len(curves.val) <= _MOST_DOTS else ""
        axes.plot(*zip(*curves.val, strict=True), color=_VAL, marker=marker, label="validation")
        title = f"validation loss {curves.val[-1][1]:.4f} nats per token: {name}"
    axes.set_title(title)
    if points := [*zip(tokens, means, strict=True), *curves.val]:
        later = [loss for place, loss in points if place >= 0.05 * max(points)[0]]  # after the first fall
        low, high = min(later + lows), max(later)
        margin = 0.08 * (high - low) or 0.05  # a single loss has no range
        axes.set_ylim(low - margin, high + margin)
        axes.legend(loc="upper right")
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_formatter(short_count)
    write_or_warn(path, png(figure))
