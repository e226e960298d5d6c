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
from common.settings import JsonDict, UserError
from model.ops.checks import NESTED, cache_folder

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
        raise UserError(
            f"nanogpt={nanogpt} has no model.py: name the folder of a clone of nanoGPT, or leave it out"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the stage ends too
    run_stages(stages_on_gpu(out.absolute(), minutes, nanogpt), minutes, out)


def stages_on_gpu(out: Path, minutes: float, nanogpt: Path | None = None) -> Stages:
    """The stages in order of priority: doctor.py compiles and checks the kernels that all others use.

    Shares are upper bounds, since unused time goes to later stages: doctor and train compile, which takes minutes.
    """
    short = minutes < 30  # fewer models and lengths
    beside = [] if nanogpt is None else [f"nanogpt={nanogpt.absolute()}"]
    recipes = (
        "models=pile_125m_2h,pile_125m" if short else "models=gpt2_124m,pile_125m_2h,pile_125m"
    )
    decoded = "models=flagship_125m" if short else "models=gpt2_124m,flagship_125m,heinsen_125m"
    tuning = (
        {} if short else {"tuning": (2.0, ["batch=16", "heads=14", "lengths=1024", "rounds=1"])}
    )
    times = tuning | {
        "train": (6.0, [recipes, *beside, "batch=16", "steps=10", "rounds=1"]),
        "decode": (1.0, [decoded, "steps=50"]),
        "operators": (
            1.0,
            ["batch=16", "lengths=1024,8192" if short else "lengths=1024,4096,32768"],
        ),
    }
    tests = sorted(
        path
        for path in ROOT.glob("tests/**/test_*.py")
        if "pytest.mark.gpu" in path.read_text("utf-8")
    )
    bench = {
        what: (
            share,
            [
                "scripts/bench.py",
                f"what={what}",
                *options,
                "profile=true",
                f"out={out / what}.json",
            ],
        )
        for what, (share, options) in times.items()
    }
    pytest = f"-m pytest --disable-plugin-autoload -p xdist -n {min(8, os.cpu_count() or 1)} -m gpu -v".split()
    first, last = (
        ["scripts/doctor.py", "training=false", f"out={out / 'doctor.json'}"],
        [*pytest, *map(str, tests)],
    )
    return {"doctor": (6.0, first), **bench, "tests": (2.0, last)}


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
        limit = (
            (end - started)
            * share
            / sum(other for key, (other, _) in stages.items() if key not in done)
        )
        say(f"{name}: {' '.join(['python', *arguments])}")
        done[name] = report_of(name, arguments, limit, path.parent)
        write_json(path, done)
        say(f"{name}: {done[name]['outcome']}")
    say(
        f"written to {path.parent}: report.json has everything, and the .txt files what each stage printed"
    )


def report_of(name: str, arguments: list[str], limit: float, out: Path) -> JsonDict:
    """Run a stage. Return its outcome, figures, finished checks of kernels, and the end of what it printed."""
    figures, output, started = out / f"{name}.json", out / f"{name}.txt", time.time()
    figures.unlink(missing_ok=True)
    outcome = outcome_of(arguments, limit, output)
    checks = [
        read_json(path) for path in cache_folder().glob("*.json") if path.stat().st_mtime >= started
    ]
    return {
        "outcome": outcome,
        "minutes": round((time.time() - started) / 60, 2),
        "figures": read_json(figures) if figures.exists() else None,
        "checks": [
            {key: one[key] for key in ("name", "failure", "seconds", "output")} for one in checks
        ],
        "printed": output.read_text("utf-8", errors="replace")[-4000:],
    }


def outcome_of(arguments: list[str], seconds: float, output: Path) -> str:
    """Run a Python process to its end or for at most this many seconds, and end all processes that it started.

    After nine tenths of the time it is interrupted, as by Ctrl-C: pytest then prints the failures until there.
    """
    packages = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": packages,
        "PYTHONUNBUFFERED": "1",
        NESTED: "1",
    }  # its checks end with it
    command = [sys.executable, *arguments]
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(0.9 * seconds)
            return "passed" if status == 0 else f"failed with status {status}"
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1 * seconds)
        return f"took longer than {0.9 * seconds / 60:.1f} minutes"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
