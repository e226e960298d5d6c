"""loss.png is drawn whatever lines there are; pytest turns every warning of matplotlib into an error."""

import resource
import struct

import pytest

from common.figures import short_count
from trainer.plot import _running_mean, draw_losses


def train(step, loss=3.0):
    return {"step": step, "tokens": 64 * step, "loss": loss / step}


def val(step, loss=3.0):
    return {"step": step, "tokens": 64 * step, "val_loss": loss / step}


def event(step, **more):
    return {"step": step, "tokens": 64 * step, "event": "skipped", "reason": "loss is inf"} | more


@pytest.mark.parametrize(
    "lines",
    [
        [train(1)],
        [val(1)],
        [train(1), val(1)],
        [train(i) for i in range(1, 200)],
        [line for i in range(1, 2000) for line in (train(i), val(i))],
        [train(2 * 10**7), val(2 * 10**7)],
        [],
        [event(1)],
        [event(1), train(1), event(2, loss=1e30), val(2), train(3)],
    ],
    ids=[
        "one point",
        "one evaluation",
        "one of each, equal",
        "no evaluation",
        "many",
        "billions of tokens",
        "nothing",
        "an event",
        "events between",
    ],
)
def test_a_picture_of(lines, tmp_path):
    path = tmp_path / "loss.png"
    path.write_bytes(b"an older picture")
    draw_losses(lines, path, title="runs/[x] $y$ _z")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">II", content[16:24]) == (960, 600)
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]


def test_running_mean_is_over_the_last_share_of_the_points():
    points = [(64 * i, float(i * i)) for i in range(10)]
    tokens, means = zip(*_running_mean(points, share=0.3), strict=True)
    assert tokens == tuple(64 * i for i in range(10))
    expected = [sum(j * j for j in range(max(0, i - 2), i + 1)) / min(3, i + 1) for i in range(10)]
    assert means == pytest.approx(expected)


def test_tokens_are_written_as_people_read_them():
    spoken = {0: "0", 64: "64", 2048: "2.048 k", 5e5: "500 k", 5e6: "5 M", 2.5e9: "2.5 B", 294.9e9: "294.9 B"}
    assert {x: short_count(x, 0) for x in spoken} == spoken


def test_events_change_no_picture(tmp_path):
    lines = [train(1), train(2), val(2), train(3)]
    draw_losses(lines, tmp_path / "without.png", title="run")
    draw_losses([event(1), *lines[:2], event(2, loss=1e30), *lines[2:]], tmp_path / "with.png", title="run")
    assert (tmp_path / "with.png").read_bytes() == (tmp_path / "without.png").read_bytes()


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    path = tmp_path / "loss.png"
    draw_losses([train(1)], path, title="run")
    before = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        draw_losses([train(1), train(2)], path, title="run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert capsys.readouterr().err == f"warning: {path} could not be redrawn (File too large)\n"
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]
    assert path.read_bytes() == before
    draw_losses([train(1), train(2)], path, title="run")
    assert path.read_bytes() != before
