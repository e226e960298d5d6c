"""metrics.jsonl, and a tracker that may fail in any way."""

import json
import sys
import threading
import types

import pytest

from common.settings import UserError
from trainer.loop import fit
from trainer.metrics import MetricsLog, WandbTracker, WandbTrackerConfig, read_metrics

pytestmark = pytest.mark.usefixtures("restored_torch")

WANDB = {"tracker": {"name": "wandb", "every": 1, "finish_seconds": 0.5}}


def test_a_log_drops_the_lines_after_the_step_it_resumes_from(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 0.1}\n{"step": 2, "val_loss": 3}\n{"step": 3}\n{"st')
    log = MetricsLog(path, resumed_at=2)
    log.write({"step": 3, "loss": 1e-300})
    assert read_metrics(path) == [  # while it is open
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": 0.1},
        {"step": 2, "val_loss": 3},
        {"step": 3, "loss": 1e-300},
    ]
    log.sync()
    log.close()


def test_a_log_refuses_what_is_not_json(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", resumed_at=0)
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.write({"step": 1, "loss": float("nan")})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\x00\xff\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged"):
        read_metrics(tmp_path / "metrics.jsonl")


class FakeWandb(types.ModuleType):
    """Takes runs and lines; `hang` and `fail` name what never returns, or raises."""

    def __init__(self, hang="", fail=""):
        super().__init__("wandb")
        self.hang, self.fail = hang, fail
        self.inits, self.lines, self.finished = [], [], 0
        self.released = threading.Event()

    def _act(self, what):
        if what == self.hang:
            self.released.wait()
        if what == self.fail:
            raise ConnectionError(f"no {what} today")

    def init(self, **settings):
        self._act("init")
        self.inits.append(settings)
        return self

    def define_metric(self, name, step_metric=None):
        self._act("define_metric")

    def log(self, line):
        self._act("log")
        self.lines.append(line)

    def finish(self):
        self._act("finish")
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    """Puts a fake wandb in place of the real one, and lets it go at the end."""
    fakes = []

    def install(**behaviour):
        fakes.append(FakeWandb(**behaviour))
        monkeypatch.setitem(sys.modules, "wandb", fakes[-1])
        return fakes[-1]

    yield install
    for fake in fakes:
        fake.released.set()
    for thread in threading.enumerate():
        if thread.name == "wandb":
            thread.join(10)


def test_wandb_gets_the_lines_of_metrics_jsonl_under_one_id(tiny, wandb):
    fake = wandb()
    fit(tiny(WANDB | {"stop_at": 4}))
    fit(tiny(WANDB))
    assert fake.lines == read_metrics(tiny().run_dir / "metrics.jsonl")
    assert fake.finished == 2
    first, second = fake.inits
    assert first["id"] == second["id"]
    assert first["resume"] == "allow"
    assert (first["project"], first["name"], first["mode"]) == ("log-gpt", "run", "online")
    assert first["dir"] == str(tiny().run_dir)
    assert first["config"] == tiny(WANDB | {"stop_at": 4}).model_dump(mode="json")


@pytest.mark.parametrize(
    "behaviour",
    [
        *({"fail": what} for what in ("init", "define_metric", "log", "finish")),
        *({"hang": what} for what in ("init", "log", "finish")),
    ],
    ids=lambda behaviour: "-".join(*behaviour.items()),
)
def test_training_goes_on_whatever_wandb_does(tiny, wandb, capsys, behaviour):
    wandb(**behaviour)
    thread = threading.Thread(target=fit, args=(tiny(WANDB),), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "training hangs"
    steps = [line["step"] for line in read_metrics(tiny().run_dir / "metrics.jsonl") if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]
    err = capsys.readouterr().err
    assert err.count("warning:") == err.count("wandb failed") == 1
    assert "did not finish within 0.5 seconds" in err if "hang" in behaviour else "ConnectionError: no" in err


def test_wandb_that_is_not_installed_is_one_warning(tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    fit(tiny(WANDB))
    assert capsys.readouterr().err.count("wandb failed") == 1


def test_wandb_that_does_not_keep_up_loses_lines_and_not_time(wandb, capsys):
    fake = wandb(hang="log")
    tracker = WandbTracker({}, finish_seconds=0.1)
    for step in range(10_100):  # more than the queue takes
        tracker.log({"step": step})
    tracker.finish()
    assert capsys.readouterr().err.count("does not keep up") == 1
    assert fake.lines == []


def test_an_error_that_ends_training_still_finishes_wandb(tiny, wandb, monkeypatch):
    fake = wandb()
    monkeypatch.setattr("trainer.loop.Run.save", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(tiny(WANDB))
    assert (len(fake.lines), fake.finished) == (2, 1)


def test_the_default_tracker_imports_no_wandb(tiny, monkeypatch):
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    fit(tiny())
    assert "wandb" not in sys.modules


def test_wandb_settings_of_a_run_can_be_named(tmp_path, wandb):
    fake = wandb()
    config = WandbTrackerConfig(name="wandb", mode="offline", project="p", run_name="n")
    config.open("abc", tmp_path, {"x": 1}).finish()
    (settings,) = fake.inits
    assert settings | {"dir": ""} == {
        "id": "abc",
        "resume": "allow",
        "mode": "offline",
        "project": "p",
        "name": "n",
        "dir": "",
        "config": {"x": 1},
    }


def test_the_real_wandb_offline(run_process, tiny_args, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    (result,) = run_process(["train.py", *tiny_args, "tracker=wandb", "tracker.mode=offline", "tracker.every=1"])
    assert result.status == 0, result.err
    assert "wandb failed" not in result.err
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
