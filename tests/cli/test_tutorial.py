"""The tutorial's commands, typed one after the other in a folder of their own."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.usefixtures("restored_torch")
def test_every_command_of_the_tutorial_does_what_it_says(command, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(ROOT / "model")  # the text that it trains on
    said = {}
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8").replace("\\\n", "")
    page = re.sub(r"max_steps=\d+", "max_steps=3", page)  # so few steps show as much
    page = page.replace("experiment=chat ", "experiment=chat stop_at=3 ")
    for line in re.findall(r"^    (python .*)$", page, re.M):
        words = shlex.split(line)
        if words[1] == "-c":
            subprocess.run(line, shell=True, check=True)
            continue
        done = command(words[1].removesuffix(".py"), *words[2:])
        assert done.status == 0, f"{line}\n{done.err}"
        said[words[1]] = done.out
    assert "nats" in said["eval.py"]
    assert said["sample.py"].startswith("class Attention")
    for file in ("runs/mine/loss.png", "runs/mine/eval.json", "runs/rates/report.html"):
        assert Path(file).is_file()
    assert Path("exports/mine/model.safetensors").is_file()
