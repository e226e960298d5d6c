"""Stages that check, time and test a GPU within a time limit, each a process; they continue after an interruption."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from pydantic import PositiveFloat

from common.console import say
from common.files import make_directory, read_json, write_json
from common.settings import UserError
from model.ops.checks import NESTED

ROOT = Path(__file__).resolve().parents[2]
Stages = dict[str, tuple[float, list[str]]]
"""By name: a share of the time, and the arguments of a Python."""


def run(minutes: PositiveFloat, out: Path, nanogpt: Path | None) -> None:
    """Run all stages on this machine's GPU.

    Raises:
        UserError: torch sees no GPU, or there is no model.py in the folder `nanogpt`.
    """
    if not torch.cuda.is_available():
        raise UserError("torch sees no GPU here: run make gpu-hour on a machine with one")
    if nanogpt is not None and not (nanogpt / "model.py").is_file():
        raise UserError(f"nanogpt={nanogpt} has no model.py: name the folder of a clone of nanoGPT, or leave it out")
    run_stages(stages_on_gpu(out.absolute(), nanogpt), minutes, out)


def stages_on_gpu(out: Path, nanogpt: Path | None = None) -> Stages:
    """The stages in order of priority: doctor.py compiles and checks the kernels that all others use."""
    beside = [] if nanogpt is None else [f"nanogpt={nanogpt.absolute()}"]
    recipes, models = "models=gpt2_124m,pile_125m_2h,pile_125m", "models=gpt2_124m,flagship_125m,heinsen_125m"
    times = {
        "train": [recipes, *beside, "batch=16", "steps=10", "rounds=1"],
        "operators": ["batch=16", "lengths=1024,4096,32768"],
        "decode": [models, "steps=50"],
    }
    tests = sorted(path for path in ROOT.glob("tests/**/test_*.py") if "pytest.mark.gpu" in path.read_text("utf-8"))
    bench = {
        what: (2.0, ["scripts/bench.py", f"what={what}", *options, "profile=true", f"out={out / what}.json"])
        for what, options in times.items()
    }
    last = ["-m", "pytest", "-m", "gpu", "-v", "-W", "default", *map(str, tests)]
    return {"doctor": (2.0, ["scripts/doctor.py", f"out={out / 'found.json'}"]), **bench, "tests": (3.0, last)}


def run_stages(stages: Stages, minutes: float, out: Path) -> None:
    """Run the stages without an outcome in report.json, which is written anew after each.

    The remaining time is shared among the remaining stages, so a stage that ends early leaves more time to later ones.
    """
    path = make_directory(out, "out").absolute() / "report.json"
    done, end = read_json(path) if path.exists() else {}, time.monotonic() + 60 * minutes
    for name, (share, arguments) in stages.items():
        if name in done:
            continue
        started = time.monotonic()
        limit = (end - started) * share / sum(other for key, (other, _) in stages.items() if key not in done)
        say(f"{name}: {' '.join(['python', *arguments])}")
        outcome = outcome_of(arguments, limit, path.with_name(f"{name}.txt"))
        done[name] = {"outcome": outcome, "minutes": round((time.monotonic() - started) / 60, 2)}
        write_json(path, done)
        say(f"{name}: {outcome}")
    say(f"written to {path.parent}: report.json, what each stage prints (.txt), and its figures (.json)")


def outcome_of(arguments: list[str], seconds: float, output: Path) -> str:
    """Run a Python process to its end or for at most this many seconds, and end all processes that it started."""
    packages = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": packages, "PYTHONUNBUFFERED": "1", NESTED: "1"}  # its checks end with it
    command = [sys.executable, *arguments]
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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
