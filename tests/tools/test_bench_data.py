"""scripts/bench_data.py runs, and compares the pipeline with the tokenizer's library."""

import json
from pathlib import Path

import pytest
import zstandard

from tools.bench.data import run


def test_paths_are_those_of_the_users_folder(dataset_dir, monkeypatch):
    monkeypatch.chdir(dataset_dir.parent)
    assert run("scripts/verify_dataset.py", f"dataset_dir={dataset_dir.name}").seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("library", ["encode_ordinary", "encode_batch"])
def test_measures_the_pipeline_beside_the_library(run_process, tmp_path, rank_file, dataset_dir, library):
    lines = "".join(json.dumps({"text": f"these are the words of {i}, " * 20}) + "\n" for i in range(3000))
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(lines.encode()))
    tokenizer = f"ranks={rank_file}"
    if library == "encode_batch":
        pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install -e '.[tokenizers]'")
        from data.prepare.vocabulary import learn

        learn(dataset_dir, 260, tmp_path / "tokenizer.json")
        tokenizer = f"tokenizer_json={tmp_path / 'tokenizer.json'}"
    options = [f"files={path}", tokenizer, "workers=2", "rounds=1"]
    (done,) = run_process(["scripts/bench_data.py", *options, f"out={tmp_path / 'bench'}"])
    assert done.status == 0, done.err
    found = json.loads((tmp_path / "bench" / "bench.json").read_text())
    alone, prepared, verified = found["rows"]
    assert all(row[name] > 0 for row in found["rows"] for name in ("MB_per_second", "x", "cpu_seconds"))
    assert alone["what"].startswith(library)
    assert alone["x"] == (1 / 2 if library == "encode_ordinary" else 1)
    assert verified["MB_per_second"] < prepared["MB_per_second"]
    assert found["utf8_bytes"] == sum(len(json.loads(line)["text"]) for line in lines.splitlines())
    if Path("/proc/self/statm").exists():
        assert all(0.02 < row["peak_gigabytes"] < 1.6 for row in found["rows"])
    assert [path.name for path in (tmp_path / "bench").iterdir()] == ["bench.json"]
    assert "prepared and verified" in done.out
