"""scripts/gpu_hour.py: stages run in order within a time limit, continue after an interruption, and fail alone."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import simulated_gpu

from tools import doctor
from tools.bench import gpu_hour, harness, train
from tools.bench.gpu_hour import ROOT, run_stages, stages_on_gpu


def stages(**codes):
    return {name: (1, ["-c", code]) for name, code in codes.items()}


def outcomes(out):
    return {name: row["outcome"] for name, row in json.loads((out / "report.json").read_text()).items()}


def append(path, text):
    return f"open({str(path)!r}, 'a').write({text!r})"


def test_a_stage_that_fails_or_hangs_is_reported_and_the_rest_goes_on(tmp_path, monkeypatch):
    """The time of a stage that hangs is over once it hangs, however slow the machine is."""
    ready, wait, interrupted = tmp_path / "ready", subprocess.Popen.wait, []

    def waited(process, timeout=None):
        if process.args[-1] != child or interrupted:
            return wait(process)
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.01)
        interrupted.append(True)
        raise subprocess.TimeoutExpired(child, timeout)

    child = f"import subprocess as s, sys; s.Popen([sys.executable, '-c', 'import time; time.sleep(600) # {tmp_path}'])"
    child += f"\ntry: {append(ready, '')}; s.time.sleep(60)\nexcept KeyboardInterrupt: print('2 failed so far')"
    monkeypatch.setattr(subprocess.Popen, "wait", waited)
    bad = "import sys; print('so bad'); sys.exit(3)"
    run_stages(stages(bad=bad, hangs=child, good=append(tmp_path / "ran", "g")), 60, tmp_path)
    found = outcomes(tmp_path)
    assert (found["bad"], found["good"]) == ("failed with status 3", "passed")
    assert found["hangs"].startswith("took longer than 2")
    assert (tmp_path / "ran").read_text() == "g"
    printed = {name: row["printed"] for name, row in json.loads((tmp_path / "report.json").read_text()).items()}
    assert printed == {"bad": "so bad\n", "hangs": "2 failed so far\n", "good": ""}
    what = f"time.sleep(600) # {tmp_path}".encode()  # the kernel ends it in its time
    ranks.wait_until(lambda: not any(what in line for line in commands()), "the end of all processes", seconds=60)


def commands():
    """Yield what the processes of this machine were started with."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            yield path.read_bytes()


def test_the_report_has_figures_and_the_checks_that_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    checks = tmp_path / "log_gpt" / "checks"
    checks.mkdir(parents=True)
    old, outcome = checks / "old.json", {"name": "y", "failure": None, "seconds": 9.0, "output": "0.5 of the error"}
    old.write_text("{}")
    os.utime(old, (0, 0))
    (tmp_path / "cut.json").write_text("{}")  # of an earlier call
    writes = f"{append(checks / 'new.json', json.dumps(outcome))}; {append(tmp_path / 'whole.json', '[1]')}"
    run_stages(stages(whole=writes, cut="1"), 1, tmp_path)
    found = json.loads((tmp_path / "report.json").read_text())
    assert {name: (row["figures"], row["checks"]) for name, row in found.items()} == {
        "whole": ([1], [outcome]),
        "cut": (None, []),
    }


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


def test_a_signal_that_ends_it_ends_the_stage(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_hour.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_hour, "outcome_of", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        gpu_hour.run(1, tmp_path, None)
    signal.signal(signal.SIGTERM, before)


def interrupt():
    raise KeyboardInterrupt


TINY = ["seq_len=16", "batch=2", "steps=1", "rounds=1", "lengths=64", "heads=2", "head_dim=8", "seconds=0"]
TINY += ["set=[model.n_layer=1,model.n_embd=32,model.n_head=2,model.head_dim=16,model.n_vocab=64]", "positions=20"]


@pytest.mark.gpu
@pytest.mark.parametrize("minutes", [9, pytest.param(60, marks=pytest.mark.slow)])
def test_rehearsal_with_tiny_models(command, monkeypatch, tmp_path, restored_torch, minutes):
    monkeypatch.setattr(doctor, "OTHERS", ())
    monkeypatch.setattr(doctor, "SIZES", dict.fromkeys(("cpu", "cuda"), 16))
    monkeypatch.setattr(doctor, "BYTES", dict.fromkeys(("cpu", "cuda"), 2**12))
    monkeypatch.setattr(doctor, "in_own_process", simulated_gpu.in_a_thread)
    monkeypatch.setattr(train, "in_own_process", lambda function, *arguments: function(*arguments))
    stages = stages_on_gpu(tmp_path, minutes)
    assert list(stages) == ["doctor", *["tuning"] * (minutes == 60), "train", "decode", "operators", "tests"]
    for name, (_, (script, *words)) in list(stages.items())[:-1]:
        result = command(script.removesuffix(".py"), *words, *(TINY if name != "doctor" else []))
        assert result.status == 0, result.out + result.err
        assert json.loads((tmp_path / f"{name}.json").read_text())
    assert harness.failures == {}


@pytest.mark.slow
def test_a_machine_without_the_packages_of_other_commands_will_do():
    """Those that an image with CUDA and torch lacks. The tests for GPUs are collected, in processes without them."""
    absent = ["datasets", "wandb", "zstandard", "tokenizers", "transformers", "lm_eval", "fastapi", "tensorboard"]
    words = stages_on_gpu(Path("found"), 60)["tests"][1]
    tests = [*words[words.index("-m", 1) :], "--collect-only", "-p", "no:xdist"]
    code = f"import sys, pytest; sys.modules |= dict.fromkeys({absent})\nimport tools.bench.run, tools.doctor\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit(pytest.main({tests}))"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_without_a_gpu_it_is_refused_in_one_line(command, tmp_path):
    result = command("scripts/gpu_hour", "minutes=9", f"out={tmp_path}")
    refusal = "error: torch sees no GPU here: run make gpu-hour on a machine with one\n"
    assert (result.status, result.err) == (1, refusal)


def test_a_missing_package_is_one_line():
    done = subprocess.run([sys.executable, "-S", ROOT / "scripts/gpu_hour.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {sys.executable} lacks torch, hydra, ")
    assert done.stderr.count("\n") == 1
