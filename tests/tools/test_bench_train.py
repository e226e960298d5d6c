"""scripts/bench_train.py runs, and compares models with the control."""

import json

import pytest


@pytest.mark.slow
def test_measures_models_beside_the_control(run_process, tmp_path):
    small = ["model.n_layer=1", "model.n_embd=32", "model.n_head=2", "model.head_dim=16", "model.n_vocab=64"]
    options = ["models=log_gpt_125m", "rounds=1", "steps=1", "seq_len=32", f"set={','.join(small)}"]
    (done,) = run_process(["scripts/bench_train.py", *options, f"out={tmp_path}"])
    assert done.status == 0, done.err
    control, model = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert (control["model"], model["model"]) == ("gpt2_124m", "log_gpt_125m")
    for key in ("tokens_per_second", "peak_gigabytes"):
        assert model[f"x_{key}"] == model[key] / control[key] > 0
    assert "log_gpt_125m" in done.out
