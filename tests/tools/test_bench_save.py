"""scripts/bench_save.py runs, and measures what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_measures_saves_beside_steps(tmp_path, dataset_dir):
    (tmp_path / "dataset").symlink_to(dataset_dir)  # instead of preparing one
    small = "experiment=quickstart,model.n_layer=1,model.n_head=2,model.n_embd=16,seq_len=16,batch_tokens=64"
    done = subprocess.run(
        [
            sys.executable,
            "scripts/bench_save.py",
            f"runs=[[{small}]]",
            "steps=6",
            "every=2",
            f"out={tmp_path}",
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (figures,) = json.loads((tmp_path / "bench.json").read_text())["figures"].values()
    assert 0 < figures["held_up_seconds"] < 10
    assert figures["step_seconds"] > 0
    assert figures["bytes"] > 10_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bench.json", "dataset"]
