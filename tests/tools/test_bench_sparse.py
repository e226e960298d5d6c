"""The benchmark of sparse attention runs, writes what it says, and times nothing that is wrong."""

import json

import pytest

from tools.bench import sparse


def test_it_checks_times_and_writes(command, tmp_path):
    options = ["lengths=64,300", "heads=2", "rounds=2"]
    result = command("scripts/bench_sparse", *options, f"out={tmp_path}")
    assert result.status == 0, result.err
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["command"] == f"python scripts/bench_sparse.py {' '.join(options)} out={tmp_path}"
    assert {"threads", "torch", "git_commit", "load"} <= set(found["machine"])
    assert [row["T"] for row in found["rows"]] == [64] * 8 + [300] * 8
    for row in found["rows"]:
        assert min(row["forward_ms"], row["both_ms"]) > 0
        assert row["least"] <= row["x_dense"] <= row["most"]
        assert (row["contender"] == "dense SDPA") <= (row["x_dense"] == 1)
    assert "window 256" in result.out
    assert "bench.json" in result.out


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_it_does_not_time_what_is_wrong(command, tmp_path, monkeypatch, factor):
    right = sparse.sparse_attention
    monkeypatch.setattr(sparse, "sparse_attention", lambda *qkv, patterns: right(*qkv, patterns) * factor)
    result = command("scripts/bench_sparse", "heads=2", f"out={tmp_path}")
    assert result.status == 1
    assert result.err.startswith("error: window 256 differs from its definition by")
    assert result.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_length_of_nothing_is_refused(command, tmp_path):
    result = command("scripts/bench_sparse", "lengths=0")
    assert result.status == 1
    assert "config lengths='0': Input should be greater than 0" in result.err
