"""The experiments that no test can run at their size are planned, and start with a small model on a small dataset."""

import json

import pytest

from runtime.checkpoint import newest
from runtime.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("restored_torch")]
SMALL = "model.n_vocab=257 model.n_layer=4 model.n_head=2 model.head_dim=16 model.n_embd=32 seq_len=32 batch_tokens=128"


@pytest.mark.parametrize(("name", "hours"), [("pile_125m_2h", 2.0), ("fineweb_124m", 0.8)])
def test_an_experiment_is_planned_within_its_time(command, monkeypatch, name, hours):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    machine = ["device=a100-40gb", "n_device=8", "mfu=0.4", "output=json"]
    result = command("scripts/plan", f"experiment={name}", *machine)
    assert result.status == 0, result.err
    found = json.loads(result.out)
    assert 0.5 * hours < found["time"]["seconds"] / 3600 < hours
    assert found["memory"]["peak"] < found["device"]["memory"]


@pytest.mark.parametrize("name", ["pile_125m_2h", "fineweb_124m"])
def test_an_experiment_starts(command, dataset_dir, tmp_path, name):
    options = [f"experiment={name}", f"dataset_dir={dataset_dir}", f"run_dir={tmp_path / 'run'}"]
    result = command("train", *options, *SMALL.split(), "stop_at=40", "runtime.device=cpu", "runtime.micro_batch=4")
    assert result.status == 0, result.err
    assert newest(tmp_path / "run").name == "step-00000040"
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 0.1
