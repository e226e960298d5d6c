"""The tutorial's commands, typed one after the other in a folder of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_command_of_the_tutorial_does_what_it_says(tmp_path):
    pytest.importorskip("tokenizers")
    made = {".git", "datasets", "runs", "exports"}
    for path in ROOT.iterdir():
        if path.name not in made:
            (tmp_path / path.name).symlink_to(path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # One thread: other tests run at the same time.
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = {}
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8").replace("\\\n", "")
    page = re.sub(r"max_steps=(\d+)0\b", r"max_steps=\1", page)  # a tenth of the steps shows as much
    page = page.replace("experiment=chat ", "experiment=chat stop_at=3 ")
    for line in re.findall(r"^    (python .*)$", page, re.M):
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        said[line] = done.stdout
    made_by = {line.split()[1]: out for line, out in said.items()}
    assert "nats" in made_by["eval.py"]
    assert made_by["sample.py"].startswith("class Attention")
    for file in ("mine/loss.png", "mine/eval.json", "rates/report.html"):
        assert (tmp_path / "runs" / file).is_file()
    assert (tmp_path / "exports/mine/model.safetensors").is_file()
