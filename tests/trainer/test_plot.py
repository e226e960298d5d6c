"""loss.png is drawn whatever lines there are, without a warning."""

import resource
import struct

import numpy as np
import pytest

from common.figures import png
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
    path, drawn = tmp_path / "loss.png", []
    monkeypatch.setattr("trainer.records.curves.png", lambda figure: drawn.append(figure) or png(figure))
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
    monkeypatch.setattr("trainer.records.curves.png", lambda figure: figure.no_latex)
    for _ in range(2):
        draw_losses(RunCurves([train(1)]), path, "run")
    assert capsys.readouterr().err == f"warning: {path} was not drawn: 'Figure' object has no attribute 'no_latex'\n"
    assert path.read_bytes() == before


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000])
def test_a_curve_is_in_bins_of_equally_many_values(n, monkeypatch):
    monkeypatch.setattr("trainer.records.curves._MOST_BINS", 8)
    values, curve = np.random.default_rng(n).normal(size=n), Curve()
    for i, value in enumerate(values):
        curve.add(i, value)
    size = max(1, -(-n // 8))
    parts = [values[i : i + size] for i in range(0, n, size)]
    assert [(s.n_losses, s.low, s.high) for s in curve.bins()] == [(len(p), p.min(), p.max()) for p in parts]
    assert [s.mean for s in curve.bins()] == pytest.approx([p.mean() for p in parts])
    assert [s.tokens for s in curve.bins()] == [min(i + size, n) - 1 for i in range(0, n, size)]


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    path = tmp_path / "loss.png"
    draw_losses(RunCurves([train(1)]), path, "run")
    before = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        draw_losses(RunCurves([train(1), train(2)]), path, "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert capsys.readouterr().err == f"warning: {path} was not written: File too large\n"
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]
    assert path.read_bytes() == before
    draw_losses(RunCurves([train(1), train(2)]), path, "run")
    assert path.read_bytes() != before
