"""Draw loss over learning rate for models of several widths, with optim.transfer and without it: docs/transfer.png.

python -m tools.transfer            # from docs/transfer.csv
python -m tools.transfer FOLDER     # writes docs/transfer.csv first, from the finished runs in FOLDER
"""

import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from common.figures import png
from common.files import write_atomic
from tools.report.records import read_records

TABLE = Path(__file__).resolve().parents[1] / "docs" / "transfer.csv"
_COLUMNS = ("optimizer", "transfer", "width", "rate", "loss")
_SIDES = {"": "without transfer", "yes": "with optim.transfer"}

Curve = dict[float, float]
"""Losses by learning rate."""


def main(folders: list[str]) -> None:
    """Write the picture, and with a folder the table."""
    if folders:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([_COLUMNS, *sorted(_rows(Path(folders[0])))])
        write_atomic(TABLE, text.getvalue().encode())
    rows = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))
    optimizers = sorted({row["optimizer"] for row in rows}, reverse=True)
    widths = sorted({int(row["width"]) for row in rows})
    figure = Figure(figsize=(9, 4.2 * len(optimizers)))
    grid = figure.subplots(len(optimizers), len(_SIDES), sharey="row", sharex="row", squeeze=False)
    for optimizer, panels in zip(optimizers, grid, strict=True):
        rates = sorted({float(row["rate"]) for row in rows if row["optimizer"] == optimizer})
        for (side, name), axes in zip(_SIDES.items(), panels, strict=True):
            for i, width in enumerate(widths):
                if curve := _curve(rows, optimizer, side, width):
                    lowest = _lowest(curve)
                    label = f"{width}: {lowest[0]:.2g}" if lowest else f"{width}"
                    axes.plot(*zip(*sorted(curve.items()), strict=True), "o-", color=f"C{i}", label=label)
                    if lowest:
                        axes.plot(*lowest, "*", color=f"C{i}", markersize=13)
            axes.set(xscale="log", xlabel="learning rate", title=f"{optimizer} {name}")
            # Below the axes, where it hides no point.
            axes.legend(title="features: rate of lowest loss", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
            axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
            axes.minorticks_off()
        panels[0].set_ylabel("validation loss (nats per byte)")
    write_atomic(TABLE.with_suffix(".png"), png(figure))


def _rows(folder: Path) -> Iterator[tuple[str, str, int, float, float]]:
    """One for each finished run, with the loss of its end."""
    for run in read_records([folder]):
        ends = [point for point in run.curves["val_loss"] if point["step"] == run.figures["max_steps"]]
        if ends:
            of = run.settings
            side = "yes" if of.get("optim.transfer.n_embd") else ""
            yield of["optim.name"], side, of["model.n_embd"], of["optim.max_lr"], round(ends[0]["value"], 4)


def _curve(rows: list[dict[str, str]], optimizer: str, side: str, width: int) -> Curve:
    """The smallest width is the tuned one, whose runs are the same on both sides."""
    smallest = min(int(row["width"]) for row in rows)
    found = [row for row in rows if (row["optimizer"], int(row["width"])) == (optimizer, width)]
    return {float(row["rate"]): float(row["loss"]) for row in found if width == smallest or row["transfer"] == side}


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
