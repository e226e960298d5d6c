"""Log attention beside the published formula and torch's softmax attention: error, time and memory."""

import itertools
import os
import platform
import random
import re
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from common.commit import git_commit
from common.console import console, say
from common.settings import UserError
from model.ops.log_attention import BACKENDS, fallback, log_attention, naive_log_attention

Row = dict[str, Any]


class Shape(NamedTuple):
    """Of q, k and the values alike."""

    B: int
    H: int
    T: int
    d: int

    def __str__(self) -> str:
        return f"B={self.B} H={self.H} T={self.T:,} d={self.d}"


SHAPES = {
    "cpu": [Shape(1, 24, 1024, 32), Shape(1, 4, 4096, 32), Shape(1, 4, 16384, 32)],
    "cuda": [Shape(16, H, T, d) for H, d in ((24, 32), (12, 64)) for T in (1024, 4096, 32768)],
    "quick": [Shape(1, 2, 64, 8), Shape(1, 2, 100, 8)],
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
SDPA = {"cpu": ["FLASH_ATTENTION"], "cuda": ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]}
DEVIATIONS = (1, 5, 20, 80, 200)  # of q, k and log_v: from 20 on, plain exponentials under- and overflow
ERROR_TOKENS = 512
ERRORS = ("log_y", "gradients")
LATENT_BYTES = 2e9  # the published formula keeps several times its T x d_k x d_v latents: with more it is skipped
FEWEST_ROUNDS, MOST_ROUNDS, SECONDS_A_SHAPE = 5, 50, 20.0


def bench(device_name: str, quick: bool) -> Row:
    """Check, time and print.

    Args:
        device_name: "cpu", "cuda", or "auto" for a GPU if there is one.
        quick: tiny shapes, each timed as often as must be.

    Raises:
        UserError: there is no GPU, or an implementation is wrong.
    """
    if device_name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device=cuda, but torch sees no GPU here: use --device=cpu")
    device = torch.device("cuda" if device_name != "cpu" and torch.cuda.is_available() else "cpu")
    shapes = SHAPES["quick" if quick else device.type]
    machine = describe(device)
    errors = error_rows(device, sorted({shape.d for shape in shapes}))
    print_whole(error_table(errors, machine["device"]))
    refuse_wrong(errors)
    rate = copy_rate(device)
    rows: list[Row] = []
    for shape in shapes:
        measured = measure(shape, device, 0.0 if quick else SECONDS_A_SHAPE, memory=shape == shapes[0])
        rows += [row | ratios(row, measured, rate) for row in measured]
    print_whole(table_of(rows, f"{machine['device']}, {machine['dtype']}"))
    return {"machine": machine, "errors": errors, "copy_bytes_per_second": rate, "rows": rows}


def print_whole(table: Table) -> None:
    """Print a table with nothing cut short, however narrow the terminal."""
    table.width = console.measure(table, options=console.options.update(width=200)).maximum
    console.print(table)


def implementations(device: torch.device) -> dict[str, Callable[..., Any]]:
    """Log attention by name: the published formula, and our backends that can run here."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    left_out = {"naive"} if find_spec("triton") and (device.type == "cuda" or interpreted) else {"naive", "triton"}
    names = [name for name in BACKENDS if name not in left_out]
    return {"published": naive_log_attention} | {name: partial(log_attention, backend=name) for name in names}


def contenders(device: torch.device) -> dict[str, Callable[..., Any]]:
    """What is timed, by name: log attention, and softmax attention."""

    def softmax(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    found = implementations(device)
    if device.type == "cpu":
        found.pop("triton", None)  # its interpreter's time tells nothing
    return found | {f"SDPA {x.split('_')[0].lower()}": partial(softmax, kernel=x) for x in SDPA[device.type]}


def draw_inputs(
    shape: Shape, device: torch.device, dtype: torch.dtype, deviation: float = 1.0
) -> tuple[list[Tensor], Tensor]:
    """Random q, k and log_v that want gradients, and the gradient of the result."""
    options: Any = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": dtype}
    leaves = [(deviation * torch.randn(shape, **options)).requires_grad_() for _ in range(3)]
    return leaves, torch.randn(shape, **options)


def outputs(attend: Callable[..., Any], leaves: list[Tensor], weights: Tensor) -> list[Tensor]:
    """The result and the gradients of q, k and log_v."""
    y = attend(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, weights)]


def error_rows(device: torch.device, head_sizes: list[int]) -> list[Row]:
    """Largest errors of every implementation at every range, in float32 and in the type that is timed."""
    rows: list[Row] = []
    dtypes = dict.fromkeys((torch.float32, DTYPES[device.type]))
    for dtype, d, deviation in itertools.product(dtypes, head_sizes, DEVIATIONS):
        leaves, weights = draw_inputs(Shape(1, 2, ERROR_TOKENS, d), device, dtype, deviation)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        wanted = outputs(naive_log_attention, exact, weights.double())
        about: Row = {"dtype": str(dtype).removeprefix("torch."), "d": d, "deviation": deviation}
        found = {name: errors_of(attend, leaves, weights, wanted) for name, attend in implementations(device).items()}
        # In 16 bits, either sum of log_y = log_S - log_Z adds products of up to four numbers, each half an eps off.
        rounding = 0.0 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        allowed = {f"{key}_allowed": 2 * found["published"][key] + 1e-6 + rounding for key in ERRORS}
        rows += [about | {"contender": name} | own | allowed for name, own in found.items()]
    return rows


def errors_of(attend: Callable[..., Any], leaves: list[Tensor], weights: Tensor, wanted: list[Tensor]) -> Row:
    """Largest error of log_y, and of the gradients relative to the largest; tiles that were computed in log space."""
    before = fallback.forward_tiles, fallback.backward_tiles
    got = outputs(attend, leaves, weights)
    off = torch.stack([(a.double() - b).abs().max() for a, b in zip(got, wanted, strict=True)])
    largest_gradient = max(b.abs().max() for b in wanted[1:])
    return {
        "log_y": off[0].item(),
        "gradients": (off[1:].max() / largest_gradient).item(),
        "forward_tiles": fallback.forward_tiles - before[0],
        "backward_tiles": fallback.backward_tiles - before[1],
    }


def refuse_wrong(rows: list[Row]) -> None:
    """Nothing is timed with an implementation in error.

    Raises:
        UserError: an error is more than twice the published form's plus 1e-6, and what 16-bit products add.
    """
    for row, key in itertools.product(rows, ERRORS):
        if not row[key] <= row[f"{key}_allowed"]:  # NaN is wrong too
            where = f"{row['dtype']}, d={row['d']}, standard deviation {row['deviation']}"
            error = f"error {row[key]:.1e}, allowed {row[f'{key}_allowed']:.1e}"
            raise UserError(f"backend {row['contender']} is wrong in {key} ({where}: {error}); nothing is timed")


def error_table(rows: list[Row], device: str) -> Table:
    """Errors and tiles of the fallback, a section for each range."""
    table = Table(title=f"{device}: largest errors against the definition in float64, T={ERROR_TOKENS}")
    table.add_column("standard deviation\nof q, k and log_v")
    for column in ("error\nof log_y", "of gradients,\nx the largest", "tiles in log space\nforward", "\nbackward"):
        table.add_column(column, justify="right")
    for (dtype, d, deviation), group in itertools.groupby(rows, key=itemgetter("dtype", "d", "deviation")):
        table.add_row(f"[bold]{deviation}[/] ({dtype}, d={d})")
        for row in group:
            cells = [f"{row[key]:.1e}" for key in ERRORS] + [str(row[f"{x}_tiles"]) for x in ("forward", "backward")]
            table.add_row("  " + row["contender"], *cells)
        table.add_section()
    return table


def measure(shape: Shape, device: torch.device, seconds: float, memory: bool) -> list[Row]:
    """One row for each contender that fits; says which do not."""
    leaves, weights = draw_inputs(shape, device, DTYPES[device.type])
    scratch = torch.empty(2**30, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    runs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    for name, attend in contenders(device).items():
        runs[name] = torch.no_grad()(partial(attend, *leaves)), partial(outputs, attend, leaves, weights)
        if problem := warm_up(name, runs[name], shape, scratch):
            say(f"skipped at {shape}: {name}, {problem}")
            del runs[name]
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in runs}
    begin = time.perf_counter()
    for done in range(MOST_ROUNDS):
        if done >= FEWEST_ROUNDS and time.perf_counter() - begin > seconds:
            break
        for name in random.sample(list(runs), len(runs)):  # nobody always follows the same one
            for run, found in zip(runs[name], times[name], strict=True):
                found += turn(run, scratch, seconds / 80)
    rows = []
    for name, (_, both) in runs.items():
        row: Row = {"contender": name, **shape._asdict(), "input_bytes": 3 * weights.nbytes}
        row["forward_runs"], row["both_runs"] = map(len, times[name])
        row["forward_ms"], row["both_ms"] = (1e3 * statistics.median(found) for found in times[name])
        rows.append(row | {"peak_over_inputs": peak_bytes(both, device) / row["input_bytes"] if memory else None})
    return rows


def warm_up(name: str, runs: tuple[Callable[[], Any], ...], shape: Shape, scratch: Tensor | None) -> str | None:
    """Run twice, so that nothing is compiled, tuned or first allocated later; why it cannot run, if so."""
    latents = shape.B * shape.H * shape.T * shape.d**2 * 4
    if name == "published" and latents > LATENT_BYTES:
        return f"its latents alone take {latents / 1e9:.1f} GB"
    try:
        with warnings.catch_warnings(action="ignore"):  # many lines of SDPA's, on why a kernel does not run
            for run in runs * 2:
                timed(run, scratch)
    except torch.OutOfMemoryError:
        return "out of memory"
    except RuntimeError as error:
        if not name.startswith("SDPA"):  # an error in a kernel of ours is no reason to leave it out
            raise
        return str(error).splitlines()[0]
    return None


def turn(run: Callable[[], Any], scratch: Tensor | None, seconds: float) -> list[float]:
    """Time a run at least once, and for so long: only the first finds cache and allocator as another left them."""
    times: list[float] = []
    begin = time.perf_counter()
    while not times or time.perf_counter() - begin < seconds:
        times.append(timed(run, scratch))
    return times


def timed(run: Callable[[], Any], scratch: Tensor | None) -> float:
    """Seconds that a run takes; `scratch` is large, and on the GPU."""
    if scratch is None:
        begin = time.perf_counter()
        result = run()
        end = time.perf_counter()
        del result  # freed after the clock stopped
        return end - begin
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    scratch.zero_()  # empties the cache, and gives Python the time to queue the kernels ahead of the GPU
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


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


def copy_rate(device: torch.device) -> float | None:
    """Bytes a second, read and written, of a large copy on the GPU; None, not measured, on a CPU."""
    if device.type == "cpu":
        return None
    source, target, scratch = (torch.empty(2**30, dtype=torch.uint8, device=device) for _ in range(3))
    return 2 * source.nbytes / statistics.median(timed(lambda: target.copy_(source), scratch) for _ in range(20))


def ratios(row: Row, rows: list[Row], rate: float | None) -> Row:
    """How many times as fast as the published form and as the fastest SDPA of these rows; and how near the floor."""
    found: Row = {}
    for key, beside in itertools.product(("forward", "both"), ("published", "SDPA")):
        best = min((x[f"{key}_ms"] for x in rows if x["contender"].startswith(beside)), default=None)
        found[f"{key}_over_{beside}"] = best and best / row[f"{key}_ms"]
    moved = row["input_bytes"] * 4 / 3  # log_y too
    return found | {"share_of_floor": rate and moved / rate / (row["forward_ms"] / 1e3)}


def table_of(rows: list[Row], title: str) -> Table:
    """All figures, a section for each shape."""
    table = Table(title=f"{title}: medians; x published, x SDPA: how many times as fast as these")
    table.add_column("")
    columns = ["forward\nms", "x pub-\nlished", "\nx SDPA", "and backward\nms", "x pub-\nlished", "\nx SDPA"]
    for column in [*columns, "peak memory\nover inputs", "memory floor /\nforward time"]:
        table.add_column(column, justify="right")
    for shape, group in itertools.groupby(rows, key=lambda row: Shape(*(row[key] for key in Shape._fields))):
        table.add_row(f"[bold]{shape}[/]")
        for row in group:
            cells = []
            for key in ("forward", "both"):
                speeds = (row[f"{key}_over_{beside}"] for beside in ("published", "SDPA"))
                cells += [f"{row[f'{key}_ms']:,.3f}", *("" if x is None else f"{x:.2f}" for x in speeds)]
            peak, share = row["peak_over_inputs"], row["share_of_floor"]
            cells += ["" if peak is None else f"{peak:.2f}", "not measured" if share is None else f"{share:.0%}"]
            table.add_row("  " + row["contender"], *cells)
        table.add_section()
    return table


def draw(rows: list[Row], machine: dict[str, Any], path: Path) -> None:
    """Time over length, of one head, so that shapes of many heads and of few stand on one line."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(f"Causal attention in {machine['dtype']} on {machine['device']}, threads: {machine['threads']}")
    names, head_sizes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("contender", "d"))
    lengths = sorted({row["T"] for row in rows})
    panels = (("forward_ms", "forward"), ("both_ms", "forward and backward"))
    for axes, (key, title) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        for (i, name), (j, d) in itertools.product(enumerate(names), enumerate(head_sizes)):
            own = [row for row in rows if (row["contender"], row["d"]) == (name, d)]
            times = [row[key] / (row["B"] * row["H"]) for row in own]
            axes.plot([row["T"] for row in own], times, f"C{i}" + ("o-", "s--")[j % 2], label=f"{name}, d={d}")
        axes.set(xscale="log", yscale="log", title=title, xlabel="length T (tokens)", ylabel="time per head (ms)")
        axes.set_xticks(lengths, [f"{T:,}" for T in lengths])
        axes.xaxis.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.tick_params(labelleft=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def describe(device: torch.device) -> dict[str, Any]:
    """What the figures depend on besides the command."""
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    name = cpu[1] if cpu else platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else name,
        "dtype": str(DTYPES[device.type]).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "git_commit": git_commit(),
    }
