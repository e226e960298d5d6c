"""Draw loss over learning rate for several widths and depths, with optim.transfer and without it: docs/transfer.png.

python -m tools.transfer            # from docs/transfer.csv
python -m tools.transfer FOLDER     # first replaces the part over width, or over depth, by the finished runs in FOLDER
"""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from common.figures import png
from common.files import write_atomic
from tools.report.records import read_records

TABLE = Path(__file__).resolve().parents[1] / "docs" / "transfer.csv"
_OVER = {"width": ("model.n_embd", "features"), "depth": ("model.n_layer", "layers")}
"""What varies: the setting, and what it counts."""
_COLUMNS = ("optimizer", "over", "transfer", "size", "rate", "loss")
_SIDES = {"": "without transfer", "yes": "with optim.transfer"}

Curve = dict[float, float]
"""Losses by learning rate."""


def main(folders: list[str]) -> None:
    """Write the picture, and with a folder the table."""
    rows = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))
    if folders:
        new = [dict(zip(_COLUMNS, map(str, row), strict=True)) for row in sorted(_rows(Path(folders[0])))]
        rows = [*(row for row in rows if row["over"] not in {row["over"] for row in new}), *new]
        lines = [_COLUMNS, *(row.values() for row in rows)]
        write_atomic(TABLE, "".join(f"{','.join(line)}\n" for line in lines))
    kinds = list(dict.fromkeys((row["over"], row["optimizer"]) for row in rows))
    figure = Figure(figsize=(9, 4.2 * len(kinds)))
    grid = figure.subplots(len(kinds), len(_SIDES), sharey="row", sharex="row", squeeze=False)
    for (over, optimizer), panels in zip(kinds, grid, strict=True):
        of_kind = [row for row in rows if (row["over"], row["optimizer"]) == (over, optimizer)]
        rates = sorted({float(row["rate"]) for row in of_kind})
        for (side, name), axes in zip(_SIDES.items(), panels, strict=True):
            for i, size in enumerate(sorted({int(row["size"]) for row in of_kind})):
                if curve := _curve(of_kind, side, size):
                    lowest = _lowest(curve)
                    label = f"{size}: {lowest[0]:.2g}" if lowest else f"{size}"
                    axes.plot(*zip(*sorted(curve.items()), strict=True), "o-", color=f"C{i}", label=label)
                    if lowest:
                        axes.plot(*lowest, "*", color=f"C{i}", markersize=13)
            axes.set(xscale="log", xlabel="learning rate", title=f"{optimizer} {name}, over {over}")
            # Below the axes, where it hides no point.
            title = f"{_OVER[over][1]}: rate of lowest loss"
            axes.legend(title=title, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
            axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
            axes.minorticks_off()
        panels[0].set_ylabel("validation loss (nats per byte)")
    write_atomic(TABLE.with_suffix(".png"), png(figure))


def _rows(folder: Path) -> Iterator[tuple[str, str, str, int, float, float]]:
    """One for each finished run, with the loss of its end. They are over depth if they have several."""
    runs = read_records([folder])
    over = "depth" if len({run.settings["model.n_layer"] for run in runs}) > 1 else "width"
    for run in runs:
        ends = [point for point in run.curves["val_loss"] if point["step"] == run.figures["max_steps"]]
        if ends:
            of = run.settings
            side = "yes" if of.get("optim.transfer.n_embd") else ""
            yield of["optim.name"], over, side, of[_OVER[over][0]], of["optim.max_lr"], round(ends[0]["value"], 4)


def _curve(rows: list[dict[str, str]], side: str, size: int) -> Curve:
    """The smallest size is the tuned one, whose runs are the same on both sides."""
    smallest = min(int(row["size"]) for row in rows)
    found = [row for row in rows if int(row["size"]) == size]
    return {float(row["rate"]): float(row["loss"]) for row in found if size == smallest or row["transfer"] == side}


def _lowest(curve: Curve) -> tuple[float, float] | None:
    """The lowest point of the parabola through the best run and its neighbours; None if it lacks one."""
    rates = sorted(curve)
    i = min(range(len(rates)), key=lambda i: curve[rates[i]])
    if not 0 < i < len(rates) - 1:
        return None
    parabola = np.polyfit(np.log(rates[i - 1 : i + 2]), [curve[rate] for rate in rates[i - 1 : i + 2]], 2)
    place = -parabola[1] / (2 * parabola[0])
    return float(np.exp(place)), float(np.polyval(parabola, place))


if __name__ == "__main__":
    main(sys.argv[1:])
