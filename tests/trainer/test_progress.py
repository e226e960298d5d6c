"""The line that training prints, and the bars on a terminal."""

import os
import pty
import re
import subprocess
import sys

import pytest
from ranks import ROOT

from trainer.records.announce import TrainingProgress


def line(step, loss, rate=100.0, mfu=None):
    lr = 0.008 / step
    norm = 1.23456
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


IN_STEPS = """
import time
from common.console import Track, say, warn

with Track("outer: step", 2) as outer:
    for step in (1, 2):
        with Track("inner, bytes", 4000, done=1000) as inner:
            for _ in range(3):
                time.sleep(0.11)
                inner.advance(1000, "a note [red]")
        warn("slow")
        outer.advance(1)
say("done")
"""


def test_a_terminal_shows_bars_with_rate_and_time_left_and_keeps_the_lines():
    """One below the other; when they end they are gone, and the cursor never is."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    started = subprocess.Popen(
        [sys.executable, "-c", IN_STEPS], stdout=theirs, stderr=theirs, cwd=ROOT, env=environment
    )
    os.close(theirs)
    shown = b""
    while chunk := read(ours):
        shown += chunk
    assert started.wait() == 0
    text = re.sub(r"\x1b\[\d*m", "", shown.decode())
    status = r"━+╺?━* inner, bytes 3,000 of 4,000 \(0:00 elapsed, 0:00 left\) a note \[red\] \d,\d{3}\.\d/s"
    assert re.search(r"━ outer: step *\r\n" + status, text), text
    assert re.search(r"━ outer: step 2 of 2 \(0:01 elapsed\) \d\.\d/s", text), text
    assert text.count("warning: slow\r\n") == 2
    assert text.endswith("\x1b[2K\x1b[?25h\rdone\r\n")


def read(terminal):
    """What a terminal shows next; nothing when all processes have closed it."""
    try:
        return os.read(terminal, 2**16)
    except OSError:
        return b""
