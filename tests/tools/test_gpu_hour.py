"""Stages run in order within a time limit, go on where they were cut off, and each failure is reported."""

import json
import os
import sys
import time
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tools.bench.gpu_hour import Stage, run_stages, stages_on_gpu
from tools.bench.packages import refuse_without

ROOT = Path(__file__).resolve().parents[2]


def stage(name, code, minutes=1.0, missing=None):
    return Stage(name, [sys.executable, "-c", code], minutes, missing)


def outcomes(out):
    return {row["stage"]: row["outcome"] for row in json.loads((out / "report.json").read_text())["stages"]}


def append(path, letter):
    return f"open({str(path)!r}, 'a').write({letter!r})"


def test_a_stage_that_fails_or_hangs_is_reported_and_the_rest_goes_on(tmp_path):
    child = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)  # {tmp_path}'])"
    )
    stages = [
        stage("bad", "import sys; print('so bad'); sys.exit(3)"),
        stage("hangs", child, minutes=0.02),
        stage("missing", "1", missing="no such tool"),
        stage("good", append(tmp_path / "ran", "g")),
    ]
    started = time.monotonic()
    run_stages(stages, 1, tmp_path)
    assert time.monotonic() - started < 30
    found = outcomes(tmp_path)
    assert found["bad"] == "failed with status 3"
    assert found["hangs"] == "took longer than 0.02 minutes"
    assert found["missing"] == "skipped: no such tool"
    assert found["good"] == "passed"
    assert (tmp_path / "ran").read_text() == "g"
    report = (tmp_path / "report.md").read_text()
    assert "so bad" in report
    assert "| good | " in report
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert not any(b"time.sleep(60)" in line and str(tmp_path).encode() in line for line in commands)


def test_stages_find_packages_of_the_users_path(tmp_path, monkeypatch):
    (tmp_path / "a_users_package.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run_stages([stage("both", "import a_users_package, trainer")], 1, tmp_path)
    assert outcomes(tmp_path) == {"both": "passed"}


def test_it_goes_on_where_it_was_cut_off(tmp_path):
    log = tmp_path / "ran"
    stages = [
        stage("first", append(log, "a")),
        stage(
            "second", append(log, "b") + f"; import time; time.sleep(60 if open({str(log)!r}).read() == 'ab' else 0)"
        ),
        stage("third", append(log, "c")),
    ]
    run_stages(stages, 0.05, tmp_path)
    assert outcomes(tmp_path) == {"first": "passed", "second": "not run yet", "third": "not run yet"}
    run_stages(stages, 1, tmp_path)
    assert outcomes(tmp_path) == dict.fromkeys(["first", "second", "third"], "passed")
    assert log.read_text() == "abbc"


def test_figures_of_benchmarks_are_in_the_report(tmp_path):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "bench.json").write_text('{"rows": [{"ms": 1}]}')
    run_stages([stage("bench", "1")], 1, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["figures"] == {"bench": {"rows": [{"ms": 1}]}}


def test_every_stage_is_a_command_that_is_there(tmp_path):
    stages = stages_on_gpu(tmp_path)
    assert [stage.name for stage in stages][:4] == ["doctor", "bench_train", "bench_attention", "profile"]
    assert sum("tests/test_gpu.py" in stage.command for stage in stages) == 1
    assert sum(stage.minutes for stage in stages) <= 60
    scripts = {Path(word).stem for stage in stages for word in stage.command if word.startswith("scripts/")}
    assert {path.stem for path in ROOT.glob("scripts/bench_*.py")} - scripts == {"bench_data"}  # for CPUs alone
    for name in ("bench_train", "bench_decode", "profile"):
        assert any("flagship_125m" in word for stage in stages if stage.name == name for word in stage.command)
    for one in stages:
        assert all((ROOT / word).is_file() for word in one.command if word.endswith(".py"))
        for word in one.command:
            assert not word.endswith(":check") or callable(resolve_name(word))


def test_stages_write_where_the_report_looks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = [word for stage in stages_on_gpu(Path("out")) for word in stage.command if word.startswith("out=")]
    assert len(written) > 10
    assert all(word.startswith(f"out={tmp_path}/out/") for word in written)


def test_without_a_gpu_it_is_refused_in_one_line(command, tmp_path):
    result = command("scripts/gpu_hour", f"out={tmp_path}")
    refusal = "error: torch sees no GPU here: run make gpu-hour on a machine with one\n"
    assert (result.status, result.err) == (1, refusal)


def test_a_missing_package_is_one_line():
    with pytest.raises(SystemExit, match=r"^error: \S+ lacks hydraa, yamll: pip install hydraa yamll$"):
        refuse_without("json", "hydraa", "yamll")


@pytest.mark.slow
def test_a_step_is_profiled(command, tmp_path):
    small = ["model=softmax_1m", "batch=2", "seq_len=32", "steps=1", "set=runtime.device=cpu"]
    result = command("scripts/profile_step", *small, f"out={tmp_path}")
    assert result.status == 0, result.err
    found = json.loads((tmp_path / "bench.json").read_text())
    assert "aten::_local_scalar_dense" in found["waits"]
    assert found["rows"][0]["ms"] >= found["rows"][1]["ms"] > 0
    assert (tmp_path / "trace.json").exists()


@pytest.mark.slow
def test_launch_settings_are_measured_side_by_side(command, tmp_path, monkeypatch):
    monkeypatch.setattr("tools.bench.launches.WIDTH", 8)
    monkeypatch.setattr("tools.bench.launches.ROUNDS", 1)
    small = ["head_dim=8", "gates=none,head", "warps=4", "stages=1", "registers=255", "batch=1", "tokens=70"]
    result = command("scripts/bench_launches", *small, f"out={tmp_path}")
    assert result.status == 0, result.err
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [(row["gates"], row["warps"]) for row in rows] == [("none", None), ("none", 4), ("head", None), ("head", 4)]
    assert all(row["both_ms"] > 0 for row in rows)
