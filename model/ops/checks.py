"""Kernels prove themselves before they are used: each is checked once on a kind of device, in a process of its own.

`failed_check` runs a check and keeps the outcome on disk. A check is a function that raises an error if something is
wrong; it may also crash or hang, because its process is not the caller's. `compare` is what most checks call.
"""

import contextlib
import functools
import hashlib
import inspect
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Hashable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.console import say_once
from common.files import make_directory, owned, read_json, write_json
from common.settings import UserError

SECONDS = 600.0  # of a check: compiling all variants of a kernel takes some minutes

_MISSING = {  # in what Triton prints on a machine on which it cannot compile
    "Failed to find C compiler": "no C compiler: install gcc",
    "Python.h: No such file": "no Python.h: install Python's development files, such as python3-dev",
}
# In messages of failures that may pass by themselves.
_TEMPORARY = ("out of memory", "busy or unavailable", "SIGKILL", *_MISSING)
NESTED = "LOG_GPT_IN_A_CHECK"  # set in the environment of checks, and of commands that end all that they started

Tensors = dict[str, Tensor]

outcomes: dict[str, str | None] = {}
"""What this process has asked `failed_check`, by name: why it fails, or None."""

waiting: list[Callable[[], None]] = []
"""Called again and again while this process waits for a check, so that it does not seem to hang."""


class Wrong(Exception):
    """A kernel's result is wrong."""


@functools.cache
def failed_check(
    name: str,
    check: Callable[..., None],
    device: str,
    seconds: float = SECONDS,
    **arguments: Hashable,
) -> str | None:
    """Return why a check fails here, in the rest of a sentence, or None if it passes.

    It runs if its outcome is not known yet for this kind of GPU or CPU, these arguments, these versions of torch and
    Triton, and the Python files of operators and in its folder. Of several processes, one runs it and the others wait.

    Args:
        name: what is checked, for messages.
        check: a function in a module, called with `device` and the arguments, which are plain values and tuples.
        device: such as "cuda:0".
        seconds: if the check takes longer, it has failed.
    """
    about = _about(check, device, arguments)
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    try:
        path = make_directory(cache_folder(), "XDG_CACHE_HOME") / f"{key}.json"
        outcome = _read(path)
        if outcome is None:
            where, minutes = (
                f"on this machine ({about['device']})",
                f"{math.ceil(seconds / 60)} minutes",
            )
            say_once(f"checking {name} {where}, once: this takes at most {minutes}")
            with owned(path.with_suffix(".lock"), _still_waiting):
                outcome = _read(path) or _run_and_keep(
                    path, name, about, {"device": device, **arguments}, seconds
                )
    except (UserError, OSError) as error:
        outcomes[name] = f"cannot be checked: {error}"
        return outcomes[name]
    again = f"to check again, remove log_gpt/checks/{path.name} from the folder of caches"
    outcomes[name] = (
        outcome["failure"] and f"{outcome['failure']} ({again if path.exists() else 'not kept'})"
    )
    return outcomes[name]


def _run_and_keep(
    path: Path, name: str, about: dict[str, Any], arguments: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """Run a check. Its outcome is kept, unless it failed because memory or a free GPU was missing."""
    started = time.monotonic()
    failure, output = _run(about["check"], arguments, seconds)
    outcome = {"name": name, **about, "failure": failure, "seconds": time.monotonic() - started}
    if failure is None or not any(words in failure + output for words in _TEMPORARY):
        write_json(path, outcome | {"output": output})
    return outcome


def _still_waiting() -> None:
    for call in waiting:
        call()


def cache_folder() -> Path:
    """The folder of the outcomes, one JSON file each."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        / "log_gpt"
        / "checks"
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(read_json(path))
    except UserError:  # not there, or damaged: the check runs and replaces it
        return None


def _about(
    check: Callable[..., None], device: str, arguments: dict[str, Hashable]
) -> dict[str, Any]:
    """Return all that an outcome depends on."""
    gpu = torch.cuda.get_device_properties(device) if device != "cpu" else None
    return {
        "check": f"{check.__module__}:{check.__qualname__}",
        "arguments": arguments,
        "device": cpu_name()
        if gpu is None
        else f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}",
        "torch": torch.__version__,
        "triton": triton_version(),
        "sources": digest_of_sources(Path(inspect.getfile(check)).parent),
    }


def digest_of_sources(*folders: Path) -> str:
    """Return a hash of the Python files of the operators and of other folders."""
    digest = hashlib.sha256()
    for file in sorted(
        {file for folder in (Path(__file__).parent, *folders) for file in folder.rglob("*.py")}
    ):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def separate_compiled_code() -> None:
    """Separate torch.compile's disk cache by version of our sources: its entries may contain older operators."""
    from torch.compiler import config  # slow to import

    config.cache_key_tag = digest_of_sources()


def cpu_name() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    return name[1] if name else platform.processor() or platform.machine()


def triton_version() -> str | None:
    """The version of Triton, or None if it is not installed."""
    return None if find_spec("triton") is None else str(import_module("triton").__version__)


def _run(check: str, arguments: dict[str, Any], seconds: float) -> tuple[str | None, str]:
    """Run a check in its own process. Return why it failed, or None, and the end of what it printed."""
    line = [sys.executable, "-m", __name__, check, json.dumps(arguments)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), NESTED: "1"}
    own_group = NESTED not in os.environ  # a check inside a check ends with it
    with (
        tempfile.TemporaryFile() as output
    ):  # processes that it leaves behind could keep a pipe open
        process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=own_group,
        )
        status, end = None, time.monotonic() + seconds
        try:
            while status is None and (left := end - time.monotonic()) > 0:
                _still_waiting()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(min(left, 1.0))
        finally:
            with contextlib.suppress(ProcessLookupError):
                if own_group:
                    os.killpg(process.pid, signal.SIGKILL)  # with its compilers
                else:
                    process.kill()
            process.wait()
        output.seek(0)
        printed = output.read().decode(errors="replace")[-4000:]
    return _verdict(status, printed, seconds), printed


def _verdict(status: int | None, printed: str, seconds: float) -> str | None:
    if status == 0:
        return None
    if lacks := [what for words, what in _MISSING.items() if words in printed]:
        return f"cannot be checked: Triton finds {lacks[0]}"
    if status is None:
        return f"failed a check: it did not end within {seconds:g} seconds"
    if status < 0:
        return f"failed a check: its process crashed ({signal.Signals(-status).name})"
    *_, last = "", *printed.strip().splitlines()
    return f"failed a check: {last or f'exit status {status}'}"


class Outputs(NamedTuple):
    """What an operator computes."""

    results: Tensors
    gradients: Tensors


def outputs(operator: Callable[..., Tensors], leaves: Tensors) -> Outputs:
    """Return results and the gradients of the leaves, which have names, given fixed gradients of the results."""
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    results = operator(**leaves)
    generator = torch.Generator().manual_seed(1)
    given = [
        torch.randn(y.shape, generator=generator).bfloat16().to(y) for y in results.values()
    ]  # in every type
    gradients = torch.autograd.grad(list(results.values()), list(leaves.values()), given)
    named = {f"the gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return Outputs({name: y.detach() for name, y in results.items()}, named)


def compare(
    case: str,
    operator: Callable[..., Tensors],
    definition: Callable[..., Tensors],
    leaves: Tensors,
) -> None:
    """Compare an operator with its definition in float64 on the CPU: results with and without gradients, and gradients.

    Errors may be twice those of the definition in the operator's own type, plus 1e-6 and a last place. With 16 bits,
    four more roundings are allowed: of results, and of gradients relative to the largest.

    Args:
        case: what is compared, for messages.
        operator: tensors by name -> results by name.
        definition: the same, in plain torch.

    Raises:
        Wrong: an error is larger, or a second run has other bits.
    """
    dtype = next(iter(leaves.values())).dtype
    rounding = 4 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0
    exact = outputs(definition, {name: x.detach().double().cpu() for name, x in leaves.items()})
    own = outputs(definition, leaves)
    got = outputs(operator, leaves)
    judge(case, got, own, exact, rounding)
    require_same_bits(case, got, outputs(operator, leaves))
    with torch.no_grad():  # often another kernel, which saves nothing
        judge(f"{case}, without gradients", Outputs(operator(**leaves), {}), own, exact, rounding)


def judge(case: str, got: Outputs, own: Outputs, exact: Outputs, rounding: float) -> None:
    """Raise `Wrong` if an error of `got` is larger than `compare` allows."""
    largest, shares = (
        max(x.abs().max().item() for x in exact.gradients.values()),
        dict[str, float](),
    )
    for part, name in ((kind, name) for kind in Outputs._fields for name in getattr(got, kind)):
        y, y_own, truth = (
            getattr(outputs, part)[name].detach().double().cpu() for outputs in (got, own, exact)
        )
        last_place = torch.finfo(getattr(got, part)[name].dtype).eps * truth.abs()
        error = ((y - truth).abs() - last_place).max().item()
        own_error, size = (y_own - truth).abs().max().item(), truth.abs().max().item()
        floor = (
            rounding + 1e-6 * max(1.0, size) if part == "results" else (rounding + 1e-6) * largest
        )
        allowed = 2 * own_error + floor
        shares[name] = error / (allowed or 1.0)
        if not error <= allowed:  # NaN is wrong too
            raise Wrong(f"{name} is off by {error:.1e}, and {allowed:.1e} is allowed ({case})")
    name = max(shares, key=lambda name: shares[name])
    print(
        f"{case}: at most {shares[name]:.2f} of the error allowed ({name})"
    )  # kept with the outcome of a check


def require_same_bits(case: str, first: Outputs, second: Outputs) -> None:
    """Raise `Wrong` if two runs differ."""
    for one, other in zip(first, second, strict=True):
        for name in one:
            if not torch.equal(one[name], other[name]):
                raise Wrong(f"{name} has other bits in a second run ({case})")


def _main(check: str, arguments: str) -> None:
    torch.set_float32_matmul_precision("high")  # as in training
    try:
        resolve_name(check)(**json.loads(arguments))
    except Exception as error:
        traceback.print_exc()
        name = "" if type(error).__name__ == Wrong.__name__ else f"{type(error).__name__}: "
        sys.exit(name + str(error).strip().partition("\n")[0])


if __name__ == "__main__":
    _main(*sys.argv[1:])
