"""The line that training prints."""

import pytest

from trainer.announce import TrainingProgress


def line(step, loss, rate=100.0, mfu=None):
    lr, norm = 0.008 / step, 1.23456
    return {"step": step, "loss": loss, "lr": lr, "grad_norm": norm, "tokens_per_second": rate, "mfu": mfu}


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still: clock[0] += seconds."""
    now = [1000.0]
    monkeypatch.setattr("common.console.time.monotonic", lambda: now[0])
    return now


def test_a_line_tells_of_all_steps_since_the_last(clock, capsys):
    with TrainingProgress(1200, 200) as progress:
        clock[0] += 4
        progress.take(line(201, 5.0, rate=100.0, mfu=0.2))
        clock[0] += 4
        progress.take(line(202, 4.0, rate=300.0, mfu=0.6))
        clock[0] += 6
        progress.take({"step": 203, "event": "skipped"})
        clock[0] += 1
        progress.take(line(204, 3.0))
        for _ in range(2):
            progress.flush()
    assert capsys.readouterr().out.splitlines() == [
        "step   202 of 1,200, loss 4.0000 (mean 4.5000), learning rate 3.96e-05, gradient norm 1.23, 150 tokens/s, "
        "MFU 30.0%, 1:06:32 left",  # 8 seconds for 2 steps, and 998 steps to go
        "step   203 of 1,200, 1:17:33 left",
        "step   204 of 1,200, loss 3.0000, learning rate 3.92e-05, gradient norm 1.23, 100 tokens/s, 1:02:15 left",
    ]
