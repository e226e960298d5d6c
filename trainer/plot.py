"""Draws loss.png."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from common.console import warn
from common.figures import png, short_count
from common.files import write_atomic


def draw_losses(lines: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw training and validation loss over tokens from the lines of metrics.jsonl, without its events.

    Only warns if the picture cannot be written.
    """
    lines = [line for line in lines if "event" not in line]
    train = [(line["tokens"], line["loss"]) for line in lines if "loss" in line]
    val = [(line["tokens"], line["val_loss"]) for line in lines if "val_loss" in line]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each step")
        axes.plot(*zip(*_running_mean(train), strict=True), color="tab:blue", linewidth=1.6, label="training, mean")
    if val:
        label = f"validation (last {val[-1][1]:.3f})"
        axes.plot(*zip(*val, strict=True), color="tab:orange", marker="o", markersize=4, linewidth=1.6, label=label)
        axes.set_ylim(*_limits([loss for _, loss in train[len(train) // 20 :]] + [loss for _, loss in val]))
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.xaxis.set_major_formatter(short_count)
    axes.grid(alpha=0.3)
    if train or val:
        axes.legend()
    try:
        write_atomic(path, png(figure))
    except OSError as error:
        with contextlib.suppress(OSError):
            path.with_name(path.name + ".tmp").unlink()
        warn(f"{path} could not be redrawn ({error.strerror or error})")


def _running_mean(points: list[tuple[int, float]], share: float = 0.02) -> list[tuple[int, float]]:
    """At each point, the mean over the last `share` of all points."""
    window = max(1, int(len(points) * share))
    tokens, losses = zip(*points, strict=True)
    sums = np.cumsum([0.0, *losses])
    ends = np.arange(1, len(points) + 1)
    starts = np.maximum(ends - window, 0)
    return list(zip(tokens, (sums[ends] - sums[starts]) / (ends - starts), strict=True))


def _limits(losses: list[float]) -> tuple[float, float]:
    """The range of the losses, without the steep fall at the start."""
    low, high = min(losses), max(losses)
    margin = 0.05 * (high - low) or 0.05  # a single loss has no range
    return low - margin, high + margin
