"""Draw four pictures from tables in docs: python -m tools.compare.evidence.

docs/flagship.png, from flagship.csv: how far the loss of model=flagship_* is from that of its control, model=gpt_*,
and the loss that each of its parts saves. docs/attention_forgets.png, of the earlier experiments without n-grams: the
loss over the text that was read, for log-space attention that forgets, its control and the published form, each at the
best of its learning rates in attention_forgets.csv; and, from attention_curves.csv, how far the training loss is from
the control's in long runs. docs/transfer.png, from transfer.csv: the loss over the learning rate for several widths and
depths, without optim.transfer and with it. docs/recall.png, from recall.csv: the share of right answers over the number
of pairs, and over the distance.
"""

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.figures import png, short_count
from common.files import write_atomic

DOCS = Path(__file__).resolve().parents[2] / "docs"
_OURS, _CONTROL = "log_space_forgets", "softmax_forgets_rotary"
_ARMS = {
    _CONTROL: ("softmax, forget gate, rotary (control)", "C7"),
    _OURS: ("log-space that forgets (the flagship's form)", "C4"),
    "log_space-glu-log_recurrence": ("log-space, published form", "C1"),
}
_OTHERS = {
    "softmax_forgets": ("softmax, forget gate, no positions", "C0"),
    "hybrid_second": ("log-space, one layer of four softmax (hybrid)", "C2"),
    "hybrid_second_window": ("log-space, one layer of four a window of 256", "C3"),
}
_SIZES = {256: ("0.4 M", "o"), 512: ("2 M", "s"), 1024: ("5 M", "D")}
"""Parameters of the models of each text length, and their marker."""

_FLAGSHIP = "model=flagship_1m"
_GELU = "model.block.activation=gelu"
_PAIRS = {
    "0.4 M": (f"{_FLAGSHIP} model.n_embd=82 model.n_head=4", "model=softmax_1m model.n_embd=84 model.n_head=3", 8448),
    "0.9 M, 8.4 MB": (_FLAGSHIP, "model=softmax_1m", 8192),
    "0.9 M, 18.6 MB": (_FLAGSHIP, "model=softmax_1m", 18176),
    "2 M, GELU": (
        f"{_FLAGSHIP} model.n_embd=192 model.n_head=7 {_GELU}",
        f"model=softmax_1m model.n_embd=192 model.n_head=6 {_GELU}",
        6144,
    ),
    "5 M": (
        f"{_FLAGSHIP} model.n_layer=6 model.n_embd=256 model.n_head=10 optim.max_lr=8e-3",
        "model=softmax_1m model.n_layer=6 model.n_embd=256 model.n_head=8",
        768,
    ),
}
"""Options of the flagship and of its control, and the steps of their runs, by parameters."""
_PARTS = {
    "SwiGLU": f"{_FLAGSHIP} {_GELU}",
    "product of two similarities": f"{_FLAGSHIP} model.attention.product=false",
    "forgetting (log recurrence instead)": (
        f"{_FLAGSHIP} model.attention.decay=none model/position=log_recurrence model.n_embd=126"
    ),
    "output gate": f"{_FLAGSHIP} model.attention.gate=none model.n_head=6 model.n_embd=132",
    "convolutions": f"{_FLAGSHIP} model.block.conv=0",
    "n-grams": f"{_FLAGSHIP} model.ngrams=[]",
    "all attention to other tokens": (
        "model=softmax_1m model/attention=sliding_window model.attention.window=1 model.attention.gate=silu"
    ),
}
"""Parts of the flagship, and the options of a model without each."""
_PARTS_STEPS = 2048

_RECALL = {
    "mqar": ("pairs of a text", "Recall of pairs"),
    "passkey": ("characters of a text", "Recall of five digits, after training on 256 characters"),
}
"""Tasks that are drawn: what makes them difficult, and the title."""

_SIDES = {"": "without transfer", "yes": "with optim.transfer"}
_COUNTED = {"width": "features", "depth": "layers"}
"""What the sizes in transfer.csv count, by what varies."""

Runs = dict[tuple[str, int], dict[tuple[int, int, str], float]]
"""For options and number of steps of runs, their losses by tokens, seed and machine."""
Losses = dict[tuple[str, int, int], dict[int, float]]
"""The losses by seed of each arm, text length and number of tokens, at the best learning rate."""


def main() -> None:
    """Write the pictures."""
    runs, losses = read_flagship(DOCS / "flagship.csv"), read(DOCS / "attention_forgets.csv")
    figure = Figure(figsize=(13, 5), layout="constrained")
    pairs, parts = figure.subplots(1, 2)
    _draw_pairs(pairs, runs)
    _draw_parts(parts, runs)
    write_atomic(DOCS / "flagship.png", png(figure))
    figure = Figure(figsize=(13, 6), layout="constrained")
    by_size, curves = figure.subplots(1, 2)
    _draw_losses(by_size, losses)
    _draw_curves(curves, _rows(DOCS / "attention_curves.csv"))
    write_atomic(DOCS / "attention_forgets.png", png(figure))
    write_atomic(DOCS / "transfer.png", png(_transfer(list(_rows(DOCS / "transfer.csv")))))
    write_atomic(DOCS / "recall.png", png(_recall(list(_rows(DOCS / "recall.csv")))))


def read_flagship(table: Path) -> Runs:
    """Read the runs of the flagship, its control and their variants."""
    runs: Runs = defaultdict(dict)
    for row in _rows(table):
        key = int(row["tokens"]), int(row["seed"]), row["machine"]
        runs[row["options"], int(row["steps"])][key] = float(row["val_loss"])
    return runs


def read(table: Path) -> Losses:
    """Read the runs on bytes, and keep those at each arm's learning rate of the lowest mean."""
    by_rate: dict[tuple[str, int, int], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in _rows(table):
        if row["vocabulary"] != "bytes":
            continue
        key = row["arm"], int(row["seq_len"]), int(row["tokens"])
        by_rate[key][row["max_lr"]][int(row["seed"])] = float(row["loss"])
    return {key: min(rates.values(), key=_mean) for key, rates in by_rate.items()}


def _rows(table: Path) -> Iterable[dict[str, str]]:
    return csv.DictReader(table.read_text(encoding="utf-8").splitlines())


def _mean(by_seed: dict[int, float]) -> float:
    return statistics.mean(by_seed.values())


def _differences(runs: Runs, ours: str, theirs: str, steps: int) -> dict[int, list[float]]:
    """By tokens, how far `ours` is above `theirs`, for each seed that both have on the same machine."""
    a, b = runs[ours, steps], runs[theirs, steps]
    above: dict[int, list[float]] = defaultdict(list)
    for key in sorted(a.keys() & b.keys()):
        above[key[0]].append(a[key] - b[key])
    return above


def _draw_pairs(axes: Axes, runs: Runs) -> None:
    for i, (label, (ours, control, steps)) in enumerate(_PAIRS.items()):
        above = _differences(runs, ours, control, steps)
        if not above:
            continue
        seeds = len(above[max(above)])
        means = [statistics.mean(own) for own in above.values()]
        axes.plot([*above], means, "-", color=f"C{i}", label=f"{label} ({seeds} seed{'s' * (seeds > 1)})")
        for tokens, own in above.items():
            axes.plot([tokens] * len(own), own, ".", color=f"C{i}", markersize=4)
    axes.axhline(0, color="C7", linewidth=1)
    axes.set(xlabel="bytes read", ylabel="flagship's validation loss above the control's (below 0: better)")
    axes.set_title("Flagship and control, by size and run; points are seeds")
    axes.xaxis.set_major_formatter(short_count)
    axes.legend(fontsize=8)


def _draw_parts(axes: Axes, runs: Runs) -> None:
    for part, without in _PARTS.items():
        if own := _differences(runs, without, _FLAGSHIP, _PARTS_STEPS).get(_PARTS_STEPS * 1024):
            label = f"{part}: {statistics.mean(own):z.3f}"
            axes.barh(label, statistics.mean(own), color="C4")
            axes.plot(own, [label] * len(own), ".", color="C7", markersize=6)
    axes.invert_yaxis()
    axes.set(xlabel="validation loss without it, above the flagship's (nats per byte)")
    axes.set_title("What each part is worth after 2.1 MB; points are seeds")


def _draw_losses(axes: Axes, losses: Losses) -> None:
    for arm, (label, colour) in _ARMS.items():
        for length, (size, marker) in _SIZES.items():
            points = sorted((tokens, own) for (name, T, tokens), own in losses.items() if (name, T) == (arm, length))
            if points:
                means = [(tokens, _mean(own)) for tokens, own in points]
                axes.plot(*zip(*means, strict=True), color=colour, marker=marker, label=f"{label}, {size}")
            for tokens, own in points:
                axes.plot([tokens] * len(own), [*own.values()], ".", color=colour, markersize=4)
    axes.set(xscale="log", xlabel="bytes read", ylabel="validation loss (nats per byte)")
    axes.set_title("Loss by size")
    axes.set_xticks([1e6, 3e6, 1e7, 4e7])
    axes.xaxis.set_major_formatter(short_count)
    axes.minorticks_off()
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)  # below, where it hides no run


def _draw_curves(axes: Axes, rows: Iterable[dict[str, str]]) -> None:
    """Rows are means of the training loss over the tokens since the row before."""
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        curves[row["arm"]][int(row["tokens"])] = float(row["loss"])
    for arm, (label, colour) in (_ARMS | _OTHERS).items():
        if above := [(n, loss - curves[_CONTROL][n]) for n, loss in curves[arm].items()]:
            axes.plot(*zip(*above, strict=True), color=colour, label=label)
    axes.set(xlabel="bytes read", ylabel="training loss above the control's")
    axes.set_title("2 M parameters, texts of 512 bytes")
    axes.xaxis.set_major_formatter(short_count)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13))


def _recall(rows: list[dict[str, str]]) -> Figure:
    """A panel for each task, with a line for each mechanism that has several points."""
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    curves: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["task"] in _RECALL and row["head_dim"] == "16":
            curves[row["task"], row["attention"]][int(row["tested_at"])] = float(row["accuracy"])
    curves = {key: curve for key, curve in curves.items() if len(curve) > 1}
    names = list(dict.fromkeys(name for _, name in curves))
    colours = matplotlib.colormaps["tab10"]  # the style has only eight
    for axes, (task, (difficulty, title)) in zip(figure.subplots(1, len(_RECALL)), _RECALL.items(), strict=True):
        own = {name: curve for (of_task, name), curve in curves.items() if of_task == task}
        for name, curve in own.items():
            axes.plot(*zip(*sorted(curve.items()), strict=True), "o-", color=colours(names.index(name)), label=name)
        axes.set(xscale="log", xlabel=difficulty, ylabel="share of answers that are right", title=title)
        axes.set_xticks(sorted({n for curve in own.values() for n in curve}))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.minorticks_off()
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return figure


def _transfer(rows: list[dict[str, str]]) -> Figure:
    """A row of panels for each optimizer and what varies, with a line for each size; a star is the lowest point."""
    kinds = list(dict.fromkeys((row["over"], row["optimizer"]) for row in rows))
    figure = Figure(figsize=(9, 4.2 * len(kinds)))
    grid = figure.subplots(len(kinds), len(_SIDES), sharey="row", sharex="row", squeeze=False)
    for (over, optimizer), panels in zip(kinds, grid, strict=True):
        of_kind = [row for row in rows if (row["over"], row["optimizer"]) == (over, optimizer)]
        rates = sorted({float(row["rate"]) for row in of_kind})
        for (side, name), axes in zip(_SIDES.items(), panels, strict=True):
            for i, size in enumerate(sorted({int(row["size"]) for row in of_kind})):
                if curve := _losses_by_rate(of_kind, side, size):
                    lowest = _lowest(curve)
                    label = f"{size}: {lowest[0]:.2g}" if lowest else f"{size}"
                    axes.plot(*zip(*sorted(curve.items()), strict=True), "o-", color=f"C{i}", label=label)
                    if lowest:
                        axes.plot(*lowest, "*", color=f"C{i}", markersize=13)
            axes.set(xscale="log", xlabel="learning rate", title=f"{optimizer} {name}, over {over}")
            # Below the axes, where it hides no point.
            title = f"{_COUNTED[over]}: rate of lowest loss"
            axes.legend(title=title, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
            axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
            axes.minorticks_off()
        panels[0].set_ylabel("validation loss (nats per byte)")
    return figure


def _losses_by_rate(rows: list[dict[str, str]], side: str, size: int) -> dict[float, float]:
    """The smallest size is the tuned one, whose runs are the same on both sides."""
    smallest = min(int(row["size"]) for row in rows)
    found = [row for row in rows if int(row["size"]) == size]
    return {float(row["rate"]): float(row["loss"]) for row in found if size == smallest or row["transfer"] == side}


def _lowest(losses: dict[float, float]) -> tuple[float, float] | None:
    """The lowest point of the parabola through the best run and its neighbours; None if it lacks one."""
    rates = sorted(losses)
    i = min(range(len(rates)), key=lambda i: losses[rates[i]])
    if not 0 < i < len(rates) - 1:
        return None
    near = rates[i - 1 : i + 2]
    parabola = np.polyfit(np.log(near), [losses[rate] for rate in near], 2)
    place = -parabola[1] / (2 * parabola[0])
    return float(np.exp(place)), float(np.polyval(parabola, place))


if __name__ == "__main__":
    main()
