"""The tables that eval.py prints, and eval.png."""

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich import box
from rich.table import Table
from rich.text import Text

from common.console import say, show_table
from common.figures import png

_MOST_BARS = 30
_FIRST_POSITION = 16  # in the plot of long contexts


def show_evaluation(result: dict[str, Any], checkpoint: str) -> None:
    """Print a line of totals, a table of the sets if there are several, and a table of the contexts."""
    say(
        f"{checkpoint} on {result['dataset_dir']} ({result['split']}, {result['tokens']:,} tokens): "
        f"loss {_number(result['loss'])} nats per token, perplexity {_number(result['perplexity'], 3)}, "
        f"{_number(result['bits_per_byte'])} bits per byte"
    )
    if len(result["sets"]) > 1:
        show_table(_table("set", list(result["sets"].items())))
    if result["contexts"]:
        show_table(_table("context", [(f"{row['context']:,}", row) for row in result["contexts"]]))


def _table(first: str, rows: list[tuple[str, dict[str, Any]]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first, overflow="fold", justify="right" if first == "context" else "left")
    for column in ("tokens", "loss", "perplexity", "bits per byte"):
        table.add_column(column, justify="right")
    for name, row in rows:
        numbers = _number(row["loss"]), _number(row["perplexity"], 3), _number(row["bits_per_byte"])
        table.add_row(
            *(Text(cell) for cell in (name, f"{row['tokens']:,}", *numbers))
        )  # in a Text, brackets are not markup
    return table


def _number(value: float | None, digits: int = 4) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"


def draw_evaluation(result: dict[str, Any], trained_on: int) -> bytes:
    """A PNG: loss by position in the window, at long contexts, and by set, as far as `result` has them.

    Args:
        result: the content of eval.json.
        trained_on: tokens of a training sequence.
    """
    sets = list(result["sets"].items())[:_MOST_BARS]
    plots: list[tuple[float, Callable[[Axes], None]]] = [(4.0, lambda axes: _draw_windows(axes, result))]
    if result["contexts"]:
        plots.append((4.0, lambda axes: _draw_contexts(axes, result["contexts"], trained_on)))
    if len(sets) > 1:
        plots.append((1.2 + 0.28 * len(sets), lambda axes: _draw_sets(axes, sets, result["loss"])))
    heights = [height for height, _ in plots]
    figure = Figure(figsize=(8, sum(heights)), layout="constrained")
    grid = figure.subplots(len(plots), 1, squeeze=False, height_ratios=heights)
    for axes, (_, draw) in zip(grid[:, 0], plots, strict=True):
        draw(axes)
    title = f"{result['run']} {result['checkpoint']} on {result['dataset_dir']} ({result['split']})"
    figure.suptitle(title.replace("$", r"\$"))
    return png(figure)


def _draw_windows(axes: Axes, result: dict[str, Any]) -> None:
    _draw_positions(axes, result["by_position"], color="tab:blue", marker="o", markersize=3)
    if result["loss"] is not None:
        axes.axhline(result["loss"], color="tab:gray", linestyle="--", label=f"mean {result['loss']:.3f}")
        axes.legend()
    _label_positions(axes, f"Windows of {result['seq_len']:,} tokens, {result['tokens']:,} in all")


def _draw_contexts(axes: Axes, contexts: list[dict[str, Any]], trained_on: int) -> None:
    label = "at each position (of different text)"
    _draw_positions(axes, _best_known(contexts), color="tab:orange", marker="o", markersize=3, label=label)
    means = [(row["context"], row["loss"]) for row in contexts if row["loss"] is not None]
    if means:
        label = "mean over windows of that length (of the same text)"
        axes.plot(*zip(*means, strict=True), color="tab:blue", marker="o", label=label)
    axes.axvline(trained_on, color="tab:gray", linestyle=":", label=f"trained on {trained_on:,}")
    _label_positions(axes, f"Long contexts, the state carried along, {contexts[0]['tokens']:,} tokens in all")
    axes.legend()


def _best_known(contexts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The loss at each position, from the shortest windows that reach it, because these are the most numerous. The
    first tokens of a window, whose loss is high, are in the plot of windows.
    """
    known, bins = _FIRST_POSITION, []
    for row in contexts:
        bins += [part for part in row["by_position"] if part["start"] >= known]
        known = max(known, row["context"])
    return bins


def _draw_positions(axes: Axes, bins: list[dict[str, Any]], **style: Any) -> None:
    points = [((row["start"] + row["stop"] + 1) / 2, row["loss"]) for row in bins if row["loss"] is not None]
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def _label_positions(axes: Axes, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}" if x < 1024 else f"{x / 1024:g}K")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens read so far")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


def _draw_sets(axes: Axes, sets: list[tuple[str, dict[str, Any]]], mean: float | None) -> None:
    worst_last = sorted(sets, key=lambda item: item[1]["loss"] or 0)
    names = [name.replace("$", r"\$") for name, _ in worst_last]  # matplotlib reads text between dollars as formulas
    drawn = axes.barh(names, [row["loss"] or 0 for _, row in worst_last], color="tab:blue")
    labels = [_number(row["loss"], 3) for _, row in worst_last]
    axes.bar_label(drawn, labels, label_type="center", color="white", fontsize=9)
    title = "Sets" if len(sets) < _MOST_BARS else f"The {len(sets)} largest sets"
    if mean is not None:
        axes.axvline(mean, color="tab:gray", linestyle="--")
        title += f"; dashed: all text, {mean:.3f}"
    axes.margins(x=0.02, y=0.02)
    axes.set_xlabel("loss (nats per token)")
    axes.set_title(title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
