"""scripts/bench_data.py runs, and compares the pipeline with encode_ordinary."""

import json
from pathlib import Path

import pytest
import zstandard


@pytest.mark.slow
def test_measures_the_pipeline_beside_encode_ordinary(run_process, tmp_path, rank_file):
    lines = "".join(json.dumps({"text": f"these are the words of {i}, " * 20}) + "\n" for i in range(3000))
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(lines.encode()))
    options = [f"files={path}", f"ranks={rank_file}", "workers=2", "rounds=1"]
    (done,) = run_process(["scripts/bench_data.py", *options, f"out={tmp_path / 'bench'}"])
    assert done.status == 0, done.err
    found = json.loads((tmp_path / "bench" / "bench.json").read_text())
    alone, prepared, verified = found["rows"]
    assert all(row[name] > 0 for row in found["rows"] for name in ("MB_per_second", "x", "cpu_seconds"))
    assert alone["x"] == 1 / 2
    assert verified["MB_per_second"] < prepared["MB_per_second"]
    assert found["utf8_bytes"] == sum(len(json.loads(line)["text"]) for line in lines.splitlines())
    if Path("/proc/self/statm").exists():
        assert all(0.02 < row["peak_gigabytes"] < 1.6 for row in found["rows"])
    assert [path.name for path in (tmp_path / "bench").iterdir()] == ["bench.json"]
    assert "prepared and verified" in done.out
