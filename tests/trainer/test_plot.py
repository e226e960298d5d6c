"""loss.png is drawn whatever lines there are, without a warning."""

import contextlib
import struct

import numpy as np
import pytest
from faults import LimitedFiles

from common.figures import encode_png
from trainer.records.curves import Curve, RunCurves, draw_losses


def train(step, loss=3.0):
    return {"step": step, "tokens": 64 * step, "loss": loss / step, "lr": 0.1 / step, "grad_norm": 2.0 % step}


def val(step, loss=3.0):
    return {"step": step, "tokens": 64 * step, "val_loss": loss / step}


@pytest.mark.parametrize(
    "lines",
    [
        [train(1)],
        [val(1)],
        [line for i in range(1, 2000) for line in (train(i), val(i))],
        [],
    ],
    ids=["one point", "one evaluation", "many", "nothing"],
)
def test_a_picture_of(lines, tmp_path, monkeypatch, capsys):
    path = tmp_path / "loss.png"
    drawn = []
    monkeypatch.setattr("trainer.records.curves.encode_png", lambda figure: drawn.append(figure) or encode_png(figure))
    path.write_bytes(b"an older picture")
    draw_losses(RunCurves(lines), path, "runs/[x] $y$ _z")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">II", content[16:24]) == (960, 600)
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]
    assert all(line.get_marker() == "o" for line in drawn[0].axes[0].lines if len(line.get_xdata()) == 1)
    assert capsys.readouterr().err == ""


@pytest.mark.filterwarnings("error")
def test_a_picture_never_ends_a_run_and_warns_once(tmp_path, monkeypatch, capsys):
    path = tmp_path / "loss.png"
    for _ in range(2):
        draw_losses(RunCurves([train(1)]), path, "runs/实验")
    before = path.read_bytes()
    assert capsys.readouterr().err.startswith(f"warning: {path}: Glyph 23454 ")
    monkeypatch.setattr("trainer.records.curves.encode_png", lambda figure: figure.no_latex)
    for _ in range(2):
        draw_losses(RunCurves([train(1)]), path, "run")
    assert capsys.readouterr().err == f"warning: {path} was not drawn: 'Figure' object has no attribute 'no_latex'\n"
    assert path.read_bytes() == before


@pytest.mark.parametrize(("n", "size"), [(0, 1), (1000, 1), (2500, 3)])
def test_a_curve_is_in_at_most_1000_bins_of_equally_many_values(n, size):
    values = np.random.default_rng(n).normal(size=n)
    curve = Curve()
    for i, value in enumerate(values):
        curve.add(i, value)
    bins = curve.bins()
    for number, found in enumerate(bins):
        part = values[number * size :][:size]
        assert (found.n_losses, found.low, found.high) == (len(part), part.min(), part.max())
        assert found.mean == pytest.approx(part.mean())
    assert sum(found.n_losses for found in bins) == n


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    path = tmp_path / "loss.png"
    draw_losses(RunCurves([train(1)]), path, "run")
    before = path.read_bytes()
    with contextlib.closing(LimitedFiles(1000)) as disk:
        disk.fill()
        draw_losses(RunCurves([train(1), train(2)]), path, "run")
    assert capsys.readouterr().err == f"warning: {path} was not written: File too large\n"
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]
    assert path.read_bytes() == before
