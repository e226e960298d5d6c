"""scripts/bench_loader.py runs, with a dataset of its own and a small model."""

import json

import pytest

SMALL = ["model.n_layer=1", "model.n_embd=32", "model.n_head=2", "model.head_dim=16", "model.n_vocab=257"]


@pytest.mark.slow
def test_measures_the_loader_alone_and_under_models(run_process, tmp_path):
    options = ["tokens=100000", "seq_len=64", "batch_tokens=4096", "seconds=0.2", "rate=2e5"]
    small = ["seq_len=32", "batch_tokens=64", "runtime.micro_batch=2", *SMALL]
    model = ["model_steps=1", f"set={','.join(small)}"]
    out = tmp_path / "a, b=c"
    (done,) = run_process(["scripts/bench_loader.py", *options, *model, f"out={out}"])
    assert done.status == 0, done.err
    rows = json.loads((out / "bench.json").read_text())["rows"]
    figures = {row["what"]: row for row in rows}
    assert figures.keys() == {"loader alone", "dummy model", "heinsen_125m"}
    assert all(row["tokens_per_second"] > 0 for row in figures.values())
    assert all(0 <= figures[name]["wait_share"] < 1 for name in ("dummy model", "heinsen_125m"))
    assert "heinsen_125m" in done.out
