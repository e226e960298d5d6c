"""Stages that run one after another within a time limit, each a process, and go on where they were cut off."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.console import say
from common.files import make_directory, read_json, write_atomic, write_json
from common.settings import UserError
from model.ops.checks import NESTED
from tools.bench.harness import Row, machine, markdown, print_table
from tools.bench.packages import refuse_without

ROOT = Path(__file__).resolve().parents[2]
_LINES_SHOWN = 40
_SECONDS_TO_STOP = 10.0


class Stage(NamedTuple):
    """A command, and how long it may take."""

    name: str
    command: list[str]
    minutes: float
    missing: str | None = None
    """Why it cannot run on this machine."""


def run(minutes: float, out: Path) -> None:
    """Run all stages on this machine's GPU.

    Raises:
        UserError: torch sees no GPU.
        SystemExit: triton is not installed.
    """
    if not torch.cuda.is_available():
        raise UserError("torch sees no GPU here: run make gpu-hour on a machine with one")
    refuse_without("triton")
    run_stages(stages_on_gpu(out), minutes, out)


def stages_on_gpu(out: Path) -> list[Stage]:
    """The stages in order of priority. Their limits are an hour together."""
    out = out.absolute()  # the stages run in another folder
    files = [path for path in ROOT.glob("tests/**/test_*.py") if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]
    files.sort(key=lambda path: (path.name != "test_gpu.py", path))
    tests = [str(path.relative_to(ROOT)) for path in files]
    sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"
    missing = None if shutil.which(sanitizer) else "compute-sanitizer is not installed (it comes with the CUDA toolkit)"
    quick = _script("bench_attention", out / "quick", "device=cuda", "quick=true")
    check = [sanitizer, "--target-processes=all", "--error-exitcode=1"]
    loss, recurrence = (_check(f"model.ops.{name}.check:check") for name in ("linear_cross_entropy", "log_recurrence"))
    model, models = "model=flagship_125m", "models=flagship_125m,heinsen_125m"  # the flagship has gates for heads
    gates = ["head_dim=64", "gates=head", "registers=168,255"]

    def bench(name: str, minutes: float, *options: str) -> Stage:
        return Stage(name, _script(name, out / name, *options), minutes)

    return [
        Stage("doctor", _script("doctor", out / "doctor" / "found.json"), 8),  # checks kernels for all others
        bench("bench_train", 6, models, "batch=16", "steps=10", "rounds=1"),
        bench("bench_attention", 6, "device=cuda"),
        Stage("profile", _script("profile_step", out / "profile", model), 2),
        bench("bench_decode", 3, f"{models},gpt2_124m"),
        Stage("suite", [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-W", "default", *tests], 10),
        Stage("launches", _script("bench_launches", out / "launches", "head_dim=32", "batch=128"), 3),
        Stage("launches_with_gates", _script("bench_launches", out / "launches_with_gates", *gates, "batch=128"), 3),
        bench("bench_recurrence", 1, "device=cuda"),
        bench("bench_sparse", 3, "device=cuda"),
        bench("bench_loader", 2, model, "tokens=20000000", "set=runtime.micro_batch=16"),
        bench("bench_save", 2),
        Stage("racecheck", [*check, "--tool=racecheck", *quick], 4, missing),
        Stage("racecheck_of_the_loss", [*check, "--tool=racecheck", *loss], 2, missing),
        Stage("racecheck_of_the_recurrence", [*check, "--tool=racecheck", *recurrence], 2, missing),
        Stage("memcheck", [*check, "--tool=memcheck", *quick], 3, missing),
    ]


def _check(name: str) -> list[str]:
    arguments = {"device": "cuda:0", "dtype": "bfloat16"}
    return [sys.executable, "-m", "model.ops.checks", name, json.dumps(arguments)]


def _script(name: str, out: Path, *options: str) -> list[str]:
    return [sys.executable, f"scripts/{name}.py", *options, f"out={out}"]


def run_stages(stages: Sequence[Stage], minutes: float, out: Path) -> None:
    """Run the stages that have no outcome yet, until the time is over; write the report after each."""
    out, end = make_directory(out, "out").absolute(), time.monotonic() + 60 * minutes
    for stage in stages:
        outcome = out / f"{stage.name}.json"
        if stage.missing is None and not outcome.exists() and (left := end - time.monotonic()) > 0:
            say(f"{stage.name}: {shlex.join(stage.command)}")
            found = _run(stage, min(60 * stage.minutes, left), out / f"{stage.name}.txt")
            if found["outcome"] == "stopped" and left <= 60 * stage.minutes:
                say(f"{stage.name}: cut off, because {minutes:g} minutes are over")
            else:
                write_json(outcome, found)
        _report(stages, out)
    print_table("stages", _rows(stages, out))
    say(f"written to {out / 'report.md'}")


def _run(stage: Stage, seconds: float, output: Path) -> Row:
    """Run a stage to its end or for so many seconds; the result is for its .json file."""
    started = time.monotonic()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # where packages may be, too
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", NESTED: "1"}  # its checks end with it
    with open(output, "wb") as file:
        process = subprocess.Popen(
            stage.command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(seconds)
            outcome = "passed" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            outcome = "stopped"
        finally:
            _end(process)
    return {"outcome": outcome, "minutes": round((time.monotonic() - started) / 60, 2), "command": stage.command}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_STOP)


def _rows(stages: Sequence[Stage], out: Path) -> list[Row]:
    rows: list[Row] = []
    for stage in stages:
        path = out / f"{stage.name}.json"
        found: dict[str, Any] = read_json(path) if path.exists() else {"minutes": None, "outcome": "not run yet"}
        if found["outcome"] == "stopped":
            found["outcome"] = f"took longer than {stage.minutes:g} minutes"
        if stage.missing is not None:
            found["outcome"] = f"skipped: {stage.missing}"
        rows.append({"stage": stage.name, "outcome": found["outcome"], "minutes": found["minutes"]})
    return rows


def _report(stages: Sequence[Stage], out: Path) -> None:
    """Write report.json, with the figures of all stages, and report.md, with the end of their output."""
    rows, about = _rows(stages, out), machine()
    figures = {stage.name: read_json(path) for stage in stages if (path := out / stage.name / "bench.json").exists()}
    write_json(out / "report.json", {"machine": about, "stages": rows, "figures": figures})
    lines = [f"# {about['gpu'] or about['cpu']}", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += [markdown([*rows[0]], ([str(cell or "") for cell in row.values()] for row in rows))]
    for stage in stages:
        if (output := out / f"{stage.name}.txt").exists():
            text = output.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES_SHOWN:]
            lines += ["", f"## {stage.name}", "", f"    {shlex.join(stage.command)}", "", "```", *text, "```"]
    write_atomic(out / "report.md", "\n".join(lines) + "\n")
