"""metrics.jsonl, on disks that fail too."""

import contextlib

import pytest
from faults import LimitedFiles

from trainer.records import metrics
from trainer.records.metrics import MetricsLog

pytestmark = pytest.mark.usefixtures("restored_torch")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def opened(path):
    """Opens the log at `path`, and closes it at the end."""
    logs = []

    def open_log(resumed_at=0):
        logs.append(MetricsLog(path, resumed_at))
        return logs[-1]

    yield open_log
    for log in logs:
        log.close()


def train(step):
    return {"step": step, "tokens": 64 * step, "loss": 3 / step}


def read_metrics(path):
    return list(metrics.read_metrics(path))


def steps(path):
    return [line["step"] for line in read_metrics(path)]


@pytest.mark.parametrize(
    ("left", "lost"), [(None, "1 to 2"), (b"", "1 to 2"), (b"\0" * 4096, "1 to 2"), (b'{"step": 1}\n{"st', "2 to 2")]
)
def test_steps_that_a_log_lacks_when_a_run_goes_on_are_said(path, opened, capsys, left, lost):
    opened(resumed_at=0)
    path.unlink()
    assert capsys.readouterr().err == ""
    if left is not None:
        path.write_bytes(left)
    opened(resumed_at=2)
    assert capsys.readouterr().err == f"warning: {path}: the metrics of steps {lost} are lost\n"


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ("", ""),
        (
            '{"step": 1}\n{"step": 2}\n{"step": 2, "tokens": 4, "val_loss": 3}\n{"st',
            '{"step": 1}\n{"step": 2}\n{"step": 2, "tokens": 4, "val_loss": 3}\n',
        ),
        ('{"st', ""),
        ('{"step": 1}\n{"step":2,  "a": 0.10}\n{"step": 3}\n', '{"step": 1}\n{"step":2,  "a": 0.10}\n'),
    ],
    ids=["empty", "an evaluation", "a part of a line", "in order"],
)
def test_what_a_log_keeps_it_keeps_byte_for_byte(path, opened, before, kept):
    path.write_text(before)
    opened(resumed_at=2)
    assert path.read_text() == kept


def test_a_log_refuses_what_is_not_json(path, opened):
    log = opened()
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.write({"step": 1, "loss": float("nan")})
    assert path.read_text() == ""
    log.write(train(1))
    assert steps(path) == [1]


DAMAGE = [b"\0" * 5000, b"\xff", b"{", b"[]", b"{}", b'{"step": "2"}', b"[" * 100_000]
DAMAGE += [b'{"step": 1, "tokens": 64, "val_loss": NaN}']


def test_damaged_lines_are_left_out_counted_and_removed_when_the_run_goes_on(path, opened, capsys):
    lines = [b'{"step": %d}\n' % step for step in (1, 2, 3)]
    path.write_bytes(lines[0] + b"\n".join(DAMAGE) + b"\n" + lines[1] + lines[2] + b"\0{\n" + b"\0" * 5000)
    warning = f"warning: {path}: left out {len(DAMAGE) + 1} lines that cannot be read\n"
    assert steps(path) == [1, 2, 3]
    assert capsys.readouterr().err == warning
    opened(resumed_at=2)
    assert path.read_bytes() == lines[0] + lines[1]
    assert capsys.readouterr().err == warning


def test_a_full_disk_is_an_error_and_costs_no_whole_line(path):
    log = MetricsLog(path, resumed_at=0)
    log.write(train(1))
    with contextlib.closing(LimitedFiles(path.stat().st_size + 20)) as disk:
        disk.fill()
        with pytest.raises(OSError, match=r"too large.*metrics\.jsonl"):
            log.write(train(2))
    log.close()
    log = MetricsLog(path, resumed_at=1)
    log.write(train(2))
    log.close()
    assert steps(path) == [1, 2]
