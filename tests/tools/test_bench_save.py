"""scripts/bench_save.py runs, and measures what it says."""

import json

import pytest


@pytest.mark.slow
def test_measures_saves_beside_steps(run_process, tmp_path, dataset_dir):
    (tmp_path / "dataset").symlink_to(dataset_dir)  # instead of preparing one
    small = "experiment=quickstart,model.n_layer=1,model.n_head=2,model.n_embd=16,seq_len=16,batch_tokens=64"
    (done,) = run_process(["scripts/bench_save.py", f"runs=[[{small}]]", "steps=8", f"out={tmp_path}"])
    assert done.status == 0, done.err
    (figures,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert 0 < figures["held_up_ms"] < 10_000
    assert figures["step_ms"] > 0
    assert figures["megabytes"] > 0.01
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bench.json", "dataset"]
