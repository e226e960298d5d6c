"""Trackers that fail cost a run one warning."""

import shutil
import sys
from unittest.mock import MagicMock

import pytest
import ranks
from test_metrics import read_metrics

from common import exits
from runtime.checkpoint import find_newest
from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch")

WANDB = {"tracker": {"wandb": {"every": 1, "finish_seconds": 60.0}}}


@pytest.fixture(autouse=True)
def ends_as_usual(monkeypatch):
    """A tracker that fails says how its command must end; that is not how the tests' process ends."""
    monkeypatch.setattr(exits, "at_once", False)


@pytest.fixture
def wandb(monkeypatch):
    """A wandb that records what it is given, and is its own run."""
    fake = MagicMock(url=None, dir="FOLDER/files")
    fake.init.return_value = fake
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def lines_given(wandb):
    return [call.args[0] for call in wandb.log.call_args_list]


def test_wandb_gets_the_lines_of_metrics_jsonl_under_one_id(tiny, wandb, capsys):
    fit(tiny(WANDB | {"stop_at": 4, "eval.prompt": "x"}))
    fit(tiny({"tracker": {"wandb": {"every": 1, "mode": "offline", "run_name": "n"}}}))
    upload = "wandb: offline; to upload the run later: wandb sync FOLDER\n"
    assert upload in capsys.readouterr().out
    assert lines_given(wandb) == read_metrics(tiny().run_dir / "metrics.jsonl")
    assert wandb.finish.call_count == 2
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert first["id"] == second["id"]
    assert (first["resume"], first["dir"]) == ("allow", str(tiny().run_dir))
    assert (first["project"], first["name"], first["mode"]) == ("log-gpt", "run", "online")
    assert first["settings"]["finish_timeout"] == 60
    assert (second["name"], second["mode"]) == ("n", "offline")
    assert first["config"] == tiny(WANDB | {"stop_at": 4, "eval.prompt": "x"}).model_dump(mode="json")
    assert not exits.at_once


@pytest.mark.parametrize("fail", ["init", "log", "finish"])
def test_training_goes_on_whatever_wandb_does(tiny, wandb, capfd, fail):
    error = ConnectionError(f"no {fail} today\n  (nor tomorrow)")
    getattr(wandb, fail).side_effect = error
    fit(tiny(WANDB))
    assert [line["step"] for line in read_metrics(tiny().run_dir / "metrics.jsonl") if "loss" in line] == [*range(1, 7)]
    err = capfd.readouterr().err
    assert err.count("warning:") == err.count("wandb failed") == 1
    assert f"(ConnectionError: no {fail} today (nor tomorrow))" in err
    assert exits.at_once, "Python's end must not wait for it"


def test_an_error_that_ends_training_still_finishes_wandb(tiny, wandb, monkeypatch):
    monkeypatch.setattr("trainer.loop._save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(tiny(WANDB))
    assert (wandb.log.call_count, wandb.finish.call_count) == (2, 1)


def test_a_command_with_a_library_that_fails_and_hangs_ends_with_its_status(tiny_args, tmp_path):
    program = """
import runpy, sys, threading, types
fake = types.ModuleType("wandb")
fake.init = lambda **_: fake
fake.url, fake.finish = None, lambda: 1 / 0
fake.define_metric = fake.log = lambda *_, **__: None
sys.modules["wandb"] = fake
threading.Thread(target=threading.Event().wait).start()  # as wandb's, which Python waits for
runpy.run_path("train.py", run_name="__main__")
"""
    for options, status in (["max_steps=2"], 0), (["optim.max_lr=1e29"], 1):
        arguments = [*tiny_args, "tracker=wandb", *options]
        with ranks.started(1, "-c", program, *arguments, f"run_dir={tmp_path / str(status)}") as (process,):
            (result,) = ranks.finish(process, seconds=60)
        assert result.status == status, result.err
        assert result.err.count("wandb failed (ZeroDivisionError: division by zero)") == 1


def test_tensorboard_that_is_not_installed_is_one_line(command, tiny_args, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    result = command("train", *tiny_args, "tracker=[local,tensorboard]")
    assert result.err == "error: tensorboard is not installed: pip install -e '.[tensorboard]'\n"
    assert not (tmp_path / "run").exists()


def test_trackers_at_once_each_get_some_lines_and_metrics_jsonl_has_every_step(tiny, wandb, capsys):
    """The wandb is a fake one, the TensorBoard is not. A part of the run is done again."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    both = {"tracker": {"wandb": {"every": 3}, "tensorboard": {"every": 2}}, "eval.prompt": "def f(\n    x"}
    fit(tiny(both | {"stop_at": 5, "checkpoint.every": 4}))
    shutil.rmtree(find_newest(tiny().run_dir))
    fit(tiny(both))
    lines = read_metrics(tiny().run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert lines_given(wandb) == [line for line in lines if line["step"] in (3, 6)]
    events = EventAccumulator(str(tiny().run_dir / "tensorboard")).Reload()
    (text, _) = events.Tensors("sample/text_summary")
    assert text.tensor_proto.string_val[0].startswith(b"    def f(\n        x")
    assert [event.step for event in events.Scalars("loss")] == [2, 4, 6]
    stored = {(key, event.step): event.value for key in events.Tags()["scalars"] for event in events.Scalars(key)}
    for line in lines:
        for key in line.keys() & {"loss", "val_loss", "lr"} if line["step"] % 2 == 0 or "val_loss" in line else ():
            assert stored[key, line["step"]] == pytest.approx(line[key], rel=1e-6)  # it stores float32


@pytest.mark.slow
def test_the_real_wandb_offline(tiny_args, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    options = ["tracker=wandb", "tracker.wandb.mode=offline", "tracker.wandb.every=1"]
    (result,) = ranks.run(1, "train.py", *tiny_args, *options, HOME=str(tmp_path))
    assert "wandb failed" not in result.err
    (stored,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    content = stored.read_bytes()
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert repr(line.get("loss", line.get("val_loss"))).encode() in content, line
