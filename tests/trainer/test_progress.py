"""The line that training prints."""

import io
import itertools

import pytest
from rich.console import Console

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


def test_lines_become_rarer_in_a_long_run(clock, capsys):
    with TrainingProgress(10**6, 0) as progress:
        for _ in range(20_000):
            clock[0] += 1
            progress.take(line(1, 4.0))
        seconds = [int(text.split()[1].replace(",", "")) for text in capsys.readouterr().out.splitlines()]
    gaps = [after - before for before, after in itertools.pairwise(seconds)]
    assert (gaps[0], gaps[-1]) == (5, 60)
    assert gaps == sorted(gaps)


def test_on_a_terminal_times_are_named_and_lines_stay_above_the_bar(clock, monkeypatch):
    terminal = Console(force_terminal=True, width=200, file=io.StringIO(), highlight=False, soft_wrap=True)
    monkeypatch.setattr("common.console.console", terminal)
    with TrainingProgress(10, 0) as progress:
        clock[0] += 5
        progress.take(line(1, 4.0))
    shown = terminal.file.getvalue()
    assert "step  1 of 10, loss 4.0000" in shown
    assert "training: step 1 of 10" in shown
    assert "elapsed," in shown
    assert shown.rstrip("\n \x1b[?25h").endswith("left")
