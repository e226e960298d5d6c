"""The benchmarks run, write what they say, and time nothing that is wrong."""

import json

import pytest

from model.ops.log_attention import BACKENDS, naive_log_attention


def test_bench_attention_checks_times_and_writes(command, tmp_path):
    result = command("scripts/bench_attention", "--quick", "--device", "cpu", "--out", str(tmp_path))
    assert result.status == 0, result.err
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["command"] == f"python scripts/bench_attention.py --quick --device cpu --out {tmp_path}"
    assert {"device", "threads", "torch", "git_commit"} <= set(found["machine"])
    assert 0 < found["error_over_allowed"]["chunked"] <= 1
    rows = {(row["contender"], row["T"]): row for row in found["rows"]}
    assert set(rows) == {(name, T) for name in ("published", "chunked", "SDPA flash") for T in (64, 100)}
    for (_, T), row in rows.items():
        assert min(row["forward_ms"], row["both_ms"]) > 0
        assert row["both_over_published"] == pytest.approx(rows["published", T]["both_ms"] / row["both_ms"])
        assert row["forward_over_SDPA"] == pytest.approx(rows["SDPA flash", T]["forward_ms"] / row["forward_ms"])
        assert (row["peak_over_inputs"] is not None) == (T == 64)
        assert row["share_of_floor"] is None
    assert "not measured" in result.out
    assert "bench.json" in result.out
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def off_by_a_little(*args, **options):
    return naive_log_attention(*args, **options) + 1e-3


def not_a_number(*args, **options):
    return naive_log_attention(*args, **options) * float("nan")


def wrong_gradient(*args, **options):
    y = naive_log_attention(*args, **options)
    return y.detach() + 1.01 * (y - y.detach())


@pytest.mark.parametrize(
    ("wrong", "what"), [(off_by_a_little, "log_y"), (not_a_number, "log_y"), (wrong_gradient, "dq")]
)
def test_bench_attention_does_not_time_a_wrong_kernel(command, tmp_path, monkeypatch, wrong, what):
    monkeypatch.setitem(BACKENDS, "chunked", wrong)
    result = command("scripts/bench_attention", "--quick", "--device", "cpu", "--out", str(tmp_path))
    assert result.status == 1
    assert result.err.startswith(f"error: backend chunked is wrong in {what}")
    assert result.err.count("\n") == 1
    assert result.out == ""
    assert list(tmp_path.iterdir()) == []
