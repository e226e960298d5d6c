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
    figures = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert all(figures[name] > 0 for name in ("encode_ordinary", "prepared", "verified", "ratio", "cpu_seconds"))
    assert figures["rounds"][0]["utf8_bytes"] == sum(len(json.loads(line)["text"]) for line in lines.splitlines())
    if Path("/proc/self/statm").exists():
        assert 2**24 < figures["peak_bytes"] < 1.5 * 2**30
    assert [path.name for path in (tmp_path / "bench").iterdir()] == ["bench.json"]
    assert "prepared and verified" in done.out
