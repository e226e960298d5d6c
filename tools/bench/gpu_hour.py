"""Stages that check, time and test a GPU within a time limit, each a process; they go on where they were cut off."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from common.console import say
from common.files import make_directory, read_json, write_json
from common.settings import UserError
from model.ops.checks import NESTED
from tools.bench.harness import machine, print_table

ROOT = Path(__file__).resolve().parents[2]
_SECONDS_TO_STOP = 10.0
Stages = dict[str, tuple[float, list[str]]]
"""By name: a share of the time, and a command."""


def run(minutes: float, out: Path) -> None:
    """Run all stages on this machine's GPU.

    Raises:
        UserError: torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise UserError("torch sees no GPU here: run make gpu-hour on a machine with one")
    run_stages(stages_on_gpu(out.absolute()), minutes, out)


def stages_on_gpu(out: Path) -> Stages:
    """The stages in order of priority: doctor.py compiles and checks the kernels that all others use."""
    models = "models=gpt2_124m,flagship_125m,heinsen_125m"

    def bench(what: str, *options: str) -> list[str]:
        return ["scripts/bench.py", f"what={what}", *options, f"out={out / what}.json"]

    tests = sorted(path for path in ROOT.glob("tests/**/test_*.py") if "pytest.mark.gpu" in path.read_text("utf-8"))
    return {
        "doctor": (2, ["scripts/doctor.py", f"out={out / 'found.json'}"]),
        "train": (2, bench("train", models, "batch=16", "steps=10", "rounds=1", "profile=true")),
        "operators": (2, bench("operators", "batch=16", "lengths=1024,4096,32768", "profile=true")),
        "decode": (1, bench("decode", models, "steps=50", "profile=true")),
        "tests": (3, ["-m", "pytest", "-m", "gpu", "-v", "-W", "default", *map(str, tests)]),
    }


def run_stages(stages: Stages, minutes: float, out: Path) -> None:
    """Run the stages without an outcome in report.json, which is written anew after each.

    A stage may take its share of the time that is left for it and those after it: who ends early leaves more to others.
    """
    path = make_directory(out, "out").absolute() / "report.json"
    report: dict[str, Any] = read_json(path) if path.exists() else {"machine": machine(), "stages": {}}
    done, end = report["stages"], time.monotonic() + 60 * minutes
    shares = {name: share for name, (share, _) in stages.items() if name not in done}
    for name, share in shares.items():
        started = time.monotonic()
        limit = (end - started) * share / sum(shares[other] for other in shares if other not in done)
        command = [sys.executable, *stages[name][1]]
        say(f"{name}: {shlex.join(command)}")
        outcome = outcome_of(command, limit, path.with_name(f"{name}.txt"))
        minutes_taken = round((time.monotonic() - started) / 60, 2)
        done[name] = {"stage": name, "outcome": outcome, "minutes": minutes_taken, "command": command}
        write_json(path, report)
    print_table("stages", [{key: row[key] for key in ("stage", "outcome", "minutes")} for row in done.values()])
    say(f"written to {path.parent}: report.json, what each stage prints (.txt), and its figures (.json)")


def outcome_of(command: list[str], seconds: float, output: Path) -> str:
    """Run a command to its end or for so many seconds, and end all that it has started."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # where packages may be, too
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", NESTED: "1"}  # its checks end with it
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        status = process.wait(seconds)
        return "passed" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        return f"took longer than {seconds / 60:.1f} minutes"
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_TO_STOP)
