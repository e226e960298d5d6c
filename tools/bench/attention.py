"""Log attention beside the published formula and torch's softmax attention: error, time and memory."""

import itertools
import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid, scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from common.console import say
from common.figures import png
from common.files import write_atomic
from common.settings import UserError
from model.ops.log_attention import BACKENDS, fallback, log_attention, naive_log_attention
from tools.bench.harness import Row, benchmark, machine, print_table
from tools.bench.operators import (
    DTYPES,
    Operator,
    attention_inputs,
    device_named,
    errors_of,
    medians,
    outputs,
    time_passes,
)


class Shape(NamedTuple):
    """Shape of q, k and log_v."""

    B: int
    H: int
    T: int
    d: int


SHAPES = {
    "cpu": [Shape(1, 24, 1024, 32), Shape(1, 4, 4096, 32), Shape(1, 4, 16384, 32)],
    "cuda": [Shape(16, H, T, d) for H, d in ((24, 32), (12, 64)) for T in (1024, 4096, 32768)],
    "quick": [Shape(1, 2, 64, 8), Shape(1, 2, 100, 8)],
}
SDPA = {"cpu": ["FLASH_ATTENTION"], "cuda": ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]}
DEVIATIONS = (1, 5, 20, 80, 200)  # of q, k and log_v: from 20 on, plain exponentials under- and overflow
ERROR_TOKENS = 512
ERRORS = ("log_y", "gradients")
LATENT_BYTES = 2e9  # the published formula keeps several times its T x d_k x d_v latents: with more it is skipped
ROUNDS, SECONDS_OF_A_TURN = 5, {"cpu": 0.5, "cuda": 0.05}


@benchmark("medians; x: how many times as fast as the published formula, and as the fastest SDPA")
def bench(options: Any) -> Row:
    """Check, time and draw bench.png.

    Raises:
        UserError: there is no GPU, or an implementation is wrong.
    """
    device = device_named(options.device)
    shapes = SHAPES["quick" if options.quick else device.type]
    about = machine() | {"dtype": _name(DTYPES[device.type])}
    about["device"] = about["gpu" if device.type == "cuda" else "cpu"]
    errors = error_rows(device, sorted({shape.d for shape in shapes}))
    title = "largest errors against the definition in float64; of gradients: x the largest; tiles computed in log space"
    print_table(f"{about['device']}, T={ERROR_TOKENS}: {title}", errors)
    refuse_wrong(errors)
    seconds = 0.0 if options.quick else SECONDS_OF_A_TURN[device.type]
    rows = []
    for shape in shapes:
        rows += (found := measure(shape, device, seconds))
        for row in found:  # now, because the rest may take minutes
            say(f"{shape}, {row['contender']}: forward {row['forward_ms']:.3g} ms, both {row['both_ms']:.3g} ms")
    write_atomic(options.out / "bench.png", picture(rows, about))
    return {"machine": about, "errors": errors, "rows": rows}


def implementations(device: torch.device) -> dict[str, Operator]:
    """Log attention by name: the published formula, and our backends that can run here."""
    runs_triton = find_spec("triton") and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
    names = [name for name in BACKENDS if name != "naive" and (name != "triton" or runs_triton)]
    return {"published": naive_log_attention} | {name: partial(log_attention, backend=name) for name in names}


def contenders(device: torch.device) -> dict[str, Operator]:
    """What is timed, by name: log attention, without gates and with both kinds, and softmax attention."""
    found = implementations(device)
    if device.type == "cpu":
        found.pop("triton", None)  # the time of its interpreter says nothing about the kernels
    *_, backend = found  # named, since "auto" would first run a check: minutes under compute-sanitizer

    def gated(q: Tensor, k: Tensor, v: Tensor, gates: int | None) -> Any:
        return log_attention(q, k, v, logsigmoid(k[..., :gates] + 4), backend=backend)

    def softmax(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    found |= {"a gate for each head": partial(gated, gates=1), "a gate for each feature": partial(gated, gates=None)}
    return found | {f"SDPA {x.split('_')[0].lower()}": partial(softmax, kernel=x) for x in SDPA[device.type]}


def error_rows(device: torch.device, head_sizes: list[int]) -> list[Row]:
    """Largest errors of every implementation at every range, in float32 and in the type that is timed."""
    rows: list[Row] = []
    dtypes = dict.fromkeys((torch.float32, DTYPES[device.type]))
    for dtype, d, deviation in itertools.product(dtypes, head_sizes, DEVIATIONS):
        leaves, weights = attention_inputs((1, 2, ERROR_TOKENS, d), device.type, dtype, deviation)
        # In 16 bits, either sum of log_y = log_S - log_Z adds products of up to four numbers, each half an eps off.
        rounding = 0.0 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        about: Row = {"dtype": _name(dtype), "d": d, "deviation": deviation}
        for name, attend in implementations(device).items():  # the published formula first
            before = fallback.forward_tiles, fallback.backward_tiles
            errors = dict(zip(ERRORS, errors_of(attend, naive_log_attention, leaves, weights), strict=True))
            if name == "published":
                about |= {f"{key}_allowed": 2 * errors[key] + 1e-6 + rounding for key in ERRORS}
            tiles = fallback.forward_tiles - before[0], fallback.backward_tiles - before[1]
            rows.append({"contender": name, **about, **errors, "forward_tiles": tiles[0], "backward_tiles": tiles[1]})
    return rows


def refuse_wrong(rows: list[Row]) -> None:
    """Raise an error if an implementation is wrong, before anything is timed.

    Raises:
        UserError: an error is above twice the published form's, plus 1e-6, plus the rounding of 16-bit products.
    """
    for row, key in itertools.product(rows, ERRORS):
        if not row[key] <= row[f"{key}_allowed"]:  # NaN is wrong too
            where = f"{row['dtype']}, d={row['d']}, standard deviation {row['deviation']}"
            error = f"error {row[key]:.1e}, allowed {row[f'{key}_allowed']:.1e}"
            raise UserError(f"backend {row['contender']} is wrong in {key} ({where}: {error}); nothing is timed")


def measure(shape: Shape, device: torch.device, seconds: float) -> list[Row]:
    """One row for each contender that fits into memory; prints which do not."""
    leaves, weights = attention_inputs(shape, device.type, DTYPES[device.type])
    able: dict[str, Operator] = {}
    for name, attend in contenders(device).items():
        if problem := why_not(name, partial(outputs, attend, leaves, weights), shape):
            say(f"skipped at {shape}: {name}, {problem}")
        else:
            able[name] = attend
    rows = []
    for name, times in time_passes(able, leaves, weights, ROUNDS, seconds).items():
        peak = peak_bytes(partial(outputs, able[name], leaves, weights), device) / (3 * weights.nbytes)
        rows.append({"contender": name, **shape._asdict(), **medians(times), "peak_over_inputs": peak})
    for key, beside in itertools.product(("forward", "both"), ("published", "SDPA")):
        best = min((row[f"{key}_ms"] for row in rows if row["contender"].startswith(beside)), default=None)
        for row in rows:
            row[f"{key}_x_{beside}"] = best and best / row[f"{key}_ms"]
    return rows


def why_not(name: str, run: Callable[[], Any], shape: Shape) -> str | None:
    """Run both passes once, so that nothing is compiled or tuned later; returns why they cannot run, or None."""
    latents = shape.B * shape.H * shape.T * shape.d**2 * 4
    if name == "published" and latents > LATENT_BYTES:
        return f"its latents alone take {latents / 1e9:.1f} GB"
    try:
        with warnings.catch_warnings(action="ignore"):  # SDPA gives many lines of reasons why a kernel does not run
            run()
    except torch.OutOfMemoryError:
        return "out of memory"
    except RuntimeError as error:
        if not name.startswith("SDPA"):  # an error in our kernels is no reason to skip them
            raise
        return str(error).splitlines()[0]
    return None


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """The most memory that torch holds during a run, above what it held before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def picture(rows: list[Row], machine: Row) -> bytes:
    """Draw time over length, of one head, so that shapes with many heads and with few share a line."""
    figure = Figure(figsize=(11, 5))
    figure.suptitle(f"Causal attention in {machine['dtype']} on {machine['device']}, threads: {machine['threads']}")
    names, head_sizes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("contender", "d"))
    lengths = sorted({row["T"] for row in rows})
    panels = (("forward_ms", "forward"), ("both_ms", "forward and backward"))
    for axes, (key, title) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        for (i, name), (j, d) in itertools.product(enumerate(names), enumerate(head_sizes)):
            own = [row for row in rows if (row["contender"], row["d"]) == (name, d)]
            times = [row[key] / (row["B"] * row["H"]) for row in own]
            axes.loglog([row["T"] for row in own], times, f"C{i}" + ("o-", "s--")[j % 2], label=f"{name}, d={d}")
        axes.set(title=title, xlabel="length T (tokens)", ylabel="time per head (ms)")
        axes.set_xticks(lengths, [f"{T:,}" for T in lengths], minor=False)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.tick_params(labelleft=True)
        axes.legend()
    return png(figure)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
