"""scripts/gpu_hour.py: stages run in order within a time limit, continue after an interruption, and fail alone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.bench import gpu_hour
from tools.bench.gpu_hour import run_stages, stages_on_gpu

ROOT = Path(__file__).resolve().parents[2]


def stages(**codes):
    return {name: (1, ["-c", code]) for name, code in codes.items()}


def outcomes(out):
    return {name: row["outcome"] for name, row in json.loads((out / "report.json").read_text()).items()}


def append(path, letter):
    return f"open({str(path)!r}, 'a').write({letter!r})"


def test_a_stage_that_fails_or_hangs_is_reported_and_the_rest_goes_on(tmp_path):
    child = f"import subprocess as s, sys; s.run([sys.executable, '-c', 'import time; time.sleep(60) # {tmp_path}'])"
    started = time.monotonic()
    bad = "import sys; print('so bad'); sys.exit(3)"
    run_stages(stages(bad=bad, hangs=child, good=append(tmp_path / "ran", "g")), 0.1, tmp_path)
    assert time.monotonic() - started < 30
    found = outcomes(tmp_path)
    assert (found["bad"], found["good"]) == ("failed with status 3", "passed")
    assert found["hangs"].startswith("took longer than 0.")
    assert (tmp_path / "ran").read_text() == "g"
    assert (tmp_path / "bad.txt").read_text() == "so bad\n"
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert not any(b"time.sleep(60)" in line and str(tmp_path).encode() in line for line in commands)


def test_each_result_is_on_disk_before_the_next_stage_and_all_find_the_users_packages(tmp_path, monkeypatch):
    (tmp_path / "a_users_package.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = f"assert 'first' in open({str(tmp_path / 'report.json')!r}).read()"
    run_stages(stages(first="import a_users_package, common", second=report), 1, tmp_path)
    assert outcomes(tmp_path) == {"first": "passed", "second": "passed"}


def test_it_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    log = tmp_path / "ran"
    both = stages(first=append(log, "a"), second=append(log, "b"))
    run = gpu_hour.outcome_of
    monkeypatch.setattr(gpu_hour, "outcome_of", lambda *a: interrupt() if "'b'" in str(a) else run(*a))
    with pytest.raises(KeyboardInterrupt):
        run_stages(both, 1, tmp_path)
    monkeypatch.setattr(gpu_hour, "outcome_of", run)
    assert outcomes(tmp_path) == {"first": "passed"}
    run_stages(both, 1, tmp_path)
    assert outcomes(tmp_path) == {"first": "passed", "second": "passed"}
    assert log.read_text() == "ab"


def interrupt():
    raise KeyboardInterrupt


def test_every_stage_is_a_command_that_is_there(tmp_path):
    found = stages_on_gpu(tmp_path, tmp_path / "nanoGPT")
    assert list(found) == ["doctor", "train", "operators", "decode", "tests"]
    assert f"nanogpt={tmp_path / 'nanoGPT'}" in found["train"][1]
    assert str(ROOT / "tests/test_gpu.py") in found["tests"][1]
    for name, (_, words) in found.items():
        assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))
        assert name == "tests" or words[-1].startswith(f"out={tmp_path}/")


def test_without_a_gpu_it_is_refused_in_one_line(command, tmp_path):
    result = command("scripts/gpu_hour", "minutes=9", f"out={tmp_path}")
    refusal = "error: torch sees no GPU here: run make gpu-hour on a machine with one\n"
    assert (result.status, result.err) == (1, refusal)


def test_a_missing_package_is_one_line():
    done = subprocess.run([sys.executable, "-S", ROOT / "scripts/gpu_hour.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {sys.executable} lacks torch, hydra, ")
    assert done.stderr.count("\n") == 1
