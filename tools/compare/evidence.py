"""Draw docs/attention_forgets.png from three tables in docs: python -m tools.compare.evidence.

First, how far the flagship's loss is from its control's, from ngrams.csv. The other three are without n-grams: the loss
over the text that was read, for the flagship's form, its control and the published form, each at the best of its
learning rates in attention_forgets.csv; how far the training loss is from the control's in long runs, from
attention_curves.csv; and the loss that each part of the flagship's form saves.
"""

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.figures import png, short_count
from common.files import write_atomic

TABLE = Path(__file__).resolve().parents[2] / "docs" / "attention_forgets.csv"
CURVES = TABLE.with_name("attention_curves.csv")
NGRAMS = TABLE.with_name("ngrams.csv")
_OURS, _CONTROL = "log_space_forgets", "softmax_forgets_rotary"
_ARMS = {
    _CONTROL: ("softmax, forget gate, rotary (control)", "C7"),
    _OURS: ("log-space that forgets (flagship)", "C4"),
    "log_space-glu-log_recurrence": ("log-space, published form", "C1"),
}
_OTHERS = {
    "softmax_forgets": ("softmax, forget gate, no positions", "C0"),
    "hybrid_second": ("log-space, one layer of four softmax (hybrid)", "C2"),
    "hybrid_second_window": ("log-space, one layer of four a window of 256", "C3"),
}
_PARTS = {
    f"{_OURS}_by_feature": "a gate for each feature, not each head",
    f"{_OURS}_no_product": "no product",
    f"{_OURS}_no_gate": "no output gate",
    f"{_OURS}_nothing": "no forgetting; log recurrence",
    f"{_OURS}_no_conv": "no convolutions",
}
_NGRAMS = "[2,3,4,5,6,8,12,16]"
_SIZES = {256: ("0.4 M", "o"), 512: ("2 M", "s"), 1024: ("5 M", "D")}
"""Parameters of the models of each text length, and their marker."""

_SHIPPED = {
    "0.9 M": ("log_gpt2_1m, swiglu", "gpt_1m, swiglu"),
    "0.9 M, GELU": ("log_gpt2_1m", "gpt_1m"),
    "2 M, GELU": ("log_gpt2_1m model.n_embd=192 model.n_head=7", "gpt_1m model.n_embd=192 model.n_head=6"),
    "5 M, GELU": (
        "log_gpt2_1m model.n_layer=6 model.n_embd=256 model.n_head=10",
        "gpt_1m model.n_layer=6 model.n_embd=256 model.n_head=8",
    ),
}
"""Flagship and control of each size."""

Losses = dict[tuple[str, int, int], dict[int, float]]
"""The losses by seed of each arm, text length and number of tokens, at the best learning rate."""


def main() -> None:
    """Write the picture."""
    losses = read(TABLE)
    figure = Figure(figsize=(13, 11), layout="constrained")
    shipped, by_size, curves, parts = figure.subplots(2, 2).flat
    _draw_shipped(shipped, _rows(NGRAMS))
    _draw_losses(by_size, losses)
    _draw_curves(curves, _rows(CURVES))
    _draw_parts(parts, losses)
    write_atomic(TABLE.with_suffix(".png"), png(figure))


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


def _draw_shipped(axes: Axes, rows: Iterable[dict[str, str]]) -> None:
    losses: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for row in rows:
        if row["ngrams"] == _NGRAMS:
            losses[row["model"]][int(row["seed"]), int(row["tokens"])] = float(row["val_loss"])
    for colour, (label, (ours, control)) in zip(("C4", "C0", "C2", "C3"), _SHIPPED.items(), strict=True):
        above: dict[int, list[float]] = defaultdict(list)
        for seed, tokens in sorted(losses[ours].keys() & losses[control].keys()):
            above[tokens].append(losses[ours][seed, tokens] - losses[control][seed, tokens])
        means = [(tokens, statistics.mean(own)) for tokens, own in sorted(above.items())]
        if means:
            seeds = len(above[means[-1][0]])
            axes.plot(*zip(*means, strict=True), "-", color=colour, label=f"{label}, seeds: {seeds}")
        for tokens, own in above.items():
            axes.plot([tokens] * len(own), own, ".", color=colour, markersize=4)
    axes.axhline(0, color="C7", linewidth=1)
    axes.set(xlabel="bytes read", ylabel="flagship's validation loss above the control's")
    axes.set_title("With n-grams, by parameters; points are seeds")
    axes.xaxis.set_major_formatter(short_count)
    axes.legend(fontsize=8)


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
    axes.set_title("Without n-grams, by parameters")
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
    axes.set_title("Without n-grams, 2 M parameters, texts of 512 bytes")
    axes.xaxis.set_major_formatter(short_count)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13))


def _draw_parts(axes: Axes, losses: Losses) -> None:
    whole = {key[1:]: own for key, own in losses.items() if key[0] == _OURS}
    worth = {
        label: statistics.mean(own[seed] - whole[length, tokens][seed] for seed in own)
        for part, label in _PARTS.items()
        for (name, length, tokens), own in losses.items()
        if name == part
    }
    bars = axes.barh([*worth], [*worth.values()], color="C4")
    axes.bar_label(bars, fmt="%+.3f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set(xlabel="loss above the flagship's (nats per byte)", title="What each part is worth, without n-grams")


if __name__ == "__main__":
    main()
