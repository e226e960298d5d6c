"""The benchmarks run, write the results that they print, and do not time a wrong implementation."""

import json

import pytest

from model.ops.log_attention import BACKENDS, naive_log_attention


@pytest.fixture(autouse=True)
def without_the_interpreter(monkeypatch):
    """Triton's takes minutes for all the ranges; the kernels have tests of their own."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_bench_attention_checks_times_and_writes(command, tmp_path):
    result = command("scripts/bench_attention", "quick=true", "device=cpu", f"out={tmp_path}")
    assert result.status == 0, result.err
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["command"] == f"python scripts/bench_attention.py quick=true device=cpu out={tmp_path}"
    assert {"device", "threads", "torch", "git_commit"} <= set(found["machine"])
    errors = {(row["deviation"], row["contender"]): row for row in found["errors"]}
    assert set(errors) == {(deviation, name) for deviation in (1, 5, 20, 80, 200) for name in ("published", "chunked")}
    for (deviation, _), row in errors.items():
        for key in ("log_y", "gradients"):
            assert 0 < row[key] <= row[f"{key}_allowed"]
            assert row[f"{key}_allowed"] == pytest.approx(2 * errors[deviation, "published"][key] + 1e-6)
    tiles = {deviation: row["forward_tiles"] for (deviation, name), row in errors.items() if name == "chunked"}
    assert tiles[1] == tiles[5] == 0 < tiles[200]
    rows = {(row["contender"], row["T"]): row for row in found["rows"]}
    timed = "published", "chunked", "a gate for each head", "a gate for each feature", "SDPA flash"
    assert set(rows) == {(name, T) for name in timed for T in (64, 100)}
    for (_, T), row in rows.items():
        assert min(row["forward_ms"], row["both_ms"]) > 0
        assert row["both_x_published"] == pytest.approx(rows["published", T]["both_ms"] / row["both_ms"])
        assert row["forward_x_SDPA"] == pytest.approx(rows["SDPA flash", T]["forward_ms"] / row["forward_ms"])
        assert row["peak_over_inputs"] > 1
    assert "bench.json" in result.out
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def off_by_a_little(*args, **options):
    return naive_log_attention(*args, **options) + 1e-3


def not_a_number(*args, **options):
    return naive_log_attention(*args, **options) * float("nan")


def wrong_gradient(*args, **options):
    y = naive_log_attention(*args, **options)
    return y.detach() + 1.01 * (y - y.detach())


def one_gradient_not_a_number(q, k, log_v, log_f=None, **options):
    log_v = log_v.clone()
    log_v.register_hook(lambda gradient: gradient * float("nan"))
    return naive_log_attention(q, k, log_v, log_f, **options)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (off_by_a_little, "log_y"),
        (not_a_number, "log_y"),
        (wrong_gradient, "gradients"),
        (one_gradient_not_a_number, "gradients"),
    ],
)
def test_bench_attention_does_not_time_a_wrong_kernel(command, tmp_path, monkeypatch, wrong, what):
    monkeypatch.setitem(BACKENDS, "chunked", wrong)
    result = command("scripts/bench_attention", "quick=true", "device=cpu", f"out={tmp_path}")
    assert result.status == 1
    assert result.err.startswith(f"error: backend chunked is wrong in {what}")
    assert result.err.count("\n") == 1
    assert "deviation" in result.out
    assert "medians" not in result.out
    assert list(tmp_path.iterdir()) == []


def test_bench_recurrence_compares_with_the_published_form(command, tmp_path):
    options = ["lengths=64,5000", "rounds=1"]
    result = command("scripts/bench_recurrence", *options, f"out={tmp_path}")
    assert result.status == 0, result.err
    found = json.loads((tmp_path / "bench.json").read_text())
    short, long = found["rows"]
    assert (short["tokens"], long["tokens"]) == (64, 5000)
    assert all(0 < row[f"ours_{key}"] < 1e-5 for row in (short, long) for key in ("s", "gradients"))
    assert long["published_s"] > 10 * short["published_s"]
    assert all(ms > 0 for ms in found["both_ms"].values())
    assert "5,000" in result.out
    assert "x as fast" in result.out
