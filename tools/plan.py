"""Predicts the memory, time and disk space of a training run."""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import Field, model_validator
from rich.table import Table

from common.console import console, say
from common.numbers import ceil_div
from common.settings import JsonDict, UserError, suggest_name
from data.mixture import warn_of_epochs
from data.shards import choose_dtype, read_manifest
from model.gpt import GPT
from runtime.device import Compute, is_bfloat16_fast
from runtime.gpus import DEVICES, device_by_name, device_of_gpu
from tools.step_memory import Memory, means_per_parameter, memory_of
from trainer.config import TrainConfig
from trainer.micro_batch import SPARE, find_largest_fit


class PlanConfig(TrainConfig, defaults="plan"):
    """A training run and its devices."""

    dataset_dir: Path | None  # type: ignore[assignment]
    """Optional: to include the size of the dataset."""
    device: str
    """auto: this machine's GPU or CPU, as runtime.device says; or cpu, or the name of a GPU in
    runtime/gpus.py."""
    n_device: int = Field(ge=1, le=2**20)
    """Number of devices that train together."""
    mfu: float | None = Field(gt=0, le=1)
    """Model FLOP utilization: the share of the devices' peak that training reaches."""
    tokens_per_second: float | None = Field(gt=0, allow_inf_nan=False)
    """Measured rate of one device, instead of mfu."""

    @model_validator(mode="after")
    def _plan_fits(self) -> "PlanConfig":
        if self.epochs is not None:
            raise ValueError(
                f"epochs={self.epochs:g} is of a dataset, which this does not read: give max_steps"
            )
        together = self.runtime.context_parallel
        if self.n_device % together:
            raise ValueError(
                f"runtime.context_parallel={together} does not divide n_device={self.n_device}"
            )
        if self.batch_size * together < self.n_device:
            raise ValueError(
                f"batch_tokens={self.batch_tokens} is {self.batch_size} sequences, fewer than "
                f"n_device={self.n_device}: lower n_device, or raise batch_tokens"
            )
        if self.device not in ("auto", "cpu") and device_by_name(self.device) is None:
            names = ["cpu", "auto", *(known_device.name for known_device in DEVICES)]
            advice = suggest_name(self.device.lower(), names)
            raise ValueError(f"device={self.device} is not known: {advice}")
        if self.mfu and self.tokens_per_second:
            raise ValueError("mfu and tokens_per_second both set the rate: give only one")
        return self


class Target(NamedTuple):
    """The device that a run is planned for."""

    name: str
    compute: Compute
    """Kind of device, and dtype."""
    memory: float | None
    """Bytes of one device; None: unknown, or a CPU's."""
    peak: float
    """FLOP/s of one device in the dtype of the run; NaN: unknown."""


def plan_run(config: PlanConfig) -> JsonDict:
    """All figures by section, in bytes, seconds and tokens. None and NaN mean unknown.

    Raises:
        UserError: the plan needs a device that this machine does not have.
    """
    target = find_target(config)
    share = config.share_of(config.n_device)
    # The largest micro-batch that fits, and the one that the run will have.
    with torch.device("meta"):
        gpt = GPT(config.model)
    most = None  # unknown; 0: not even one sequence fits
    if target.memory is not None:
        most = largest_micro_batch(gpt, config, target.compute, config.n_device, target.memory)
    size = config.runtime.micro_batch_on(target.compute.device) or most or 1
    micro_batch = min(size, share)
    memory = memory_of(gpt, config, target.compute, config.n_device, micro_batch)
    flops_per_token = gpt.flops_per_token(config.seq_len)
    # A checkpoint has the weights, and the optimizer's state of each.
    n_stored = gpt.n_params() * (1 + means_per_parameter(gpt, config))
    return {
        "device": {"memory": target.memory},
        "model": {
            "parameters": gpt.n_params(),
            "flops_per_token": flops_per_token,
        },
        "step": {
            "tokens": config.batch_tokens,
            "sequences": config.batch_size,
            "seq_len": config.seq_len,
            "sequences_per_device": share,
            "micro_batch": micro_batch,
            "micro_batches": ceil_div(share, micro_batch),
        },
        "memory": memory._asdict() | {"peak": memory.peak, "largest_micro_batch": most},
        "time": plan_time(config, target, flops_per_token),
        "disk": plan_disk(config, round(n_stored * target.compute.param_dtype.itemsize)),
    }


def largest_micro_batch(
    gpt: GPT, config: TrainConfig, compute: Compute, n_device: int, memory: float
) -> int:
    """Return how many sequences should fit in a device's memory; 0: not even one."""
    room = memory * (1 - SPARE)
    return find_largest_fit(
        lambda size: memory_of(gpt, config, compute, n_device, size).peak <= room,
        config.share_of(n_device),
    )


def find_target(config: PlanConfig) -> Target:
    """The requested device, or this machine's.

    Raises:
        UserError: this machine has no GPU.
    """
    device = config.device
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    if device == "auto":
        device = config.runtime.device
        if device == "cuda" and not gpu:
            raise UserError(
                "runtime.device=cuda, but there is no GPU here: name one, such as device=a100-40gb"
            )
        if device == "auto":
            device = "cuda" if gpu else "cpu"
    # "cuda" is this machine's GPU. `known` is None if the table has no such device.
    known = device_of_gpu(gpu) if device == "cuda" else device_by_name(device)
    kind = torch.device("cpu" if device == "cpu" else "cuda")
    dtype = config.runtime.dtype
    if dtype == "auto":
        is_fast = known.bfloat16 is not None if known else is_bfloat16_fast(kind)
        dtype = "bfloat16" if is_fast else "float32"
    compute = Compute(kind, getattr(torch, dtype), config.runtime.sequence_chunk)
    if known is not None:
        peak = known.peak(compute.dtype) or math.nan
        return Target(known.name, compute, known.memory * 1e9, peak)
    if device == "cuda":
        return Target(gpu, compute, float(torch.cuda.mem_get_info()[1]), math.nan)
    return Target(device, compute, None, math.nan)


def plan_time(config: PlanConfig, target: Target, flops: int) -> JsonDict:
    """Steps and tokens, and their duration at the given rate. `flops`: of a token."""
    tokens = config.tokens(config.last_step)
    rate = config.tokens_per_second or (config.mfu or math.nan) * target.peak / flops
    total_rate = rate * config.n_device
    seconds = tokens / total_rate
    return {
        "steps": config.last_step,
        "tokens": tokens,
        "flops": tokens * flops,
        "tokens_per_second": total_rate,
        "mfu": rate * flops / target.peak,
        "seconds": seconds,
        "device_hours": seconds * config.n_device / 3600,
        "seconds_at_peak": tokens * flops / (target.peak * config.n_device),
    }


def plan_disk(config: PlanConfig, checkpoint: int) -> JsonDict:
    """Bytes of a checkpoint, of all kept checkpoints, and of the dataset."""
    settings = config.checkpoint
    n_kept = settings.keep_last + 1  # 1: best
    if settings.keep_every is not None:
        n_kept += config.last_step // settings.keep_every
    n_kept = min(ceil_div(config.last_step, settings.every or config.last_step), n_kept)
    tokens = config.tokens(config.last_step)
    disk: JsonDict = {
        "checkpoint": checkpoint,
        "checkpoints": checkpoint * n_kept,
        "checkpoints_kept": n_kept,
        "bytes_of_all_tokens": tokens * choose_dtype(config.model.n_vocab).itemsize,
    }
    if config.dataset_dir is not None:
        files = [file for file in config.dataset_dir.iterdir() if file.is_file()]
        train = read_manifest(config.dataset_dir).splits["train"].total
        disk["dataset_tokens"] = train.tokens
        disk["dataset_bytes"] = sum(file.stat().st_size for file in files)
        disk["dataset_epochs"] = tokens / max(1, train.tokens)
    return disk


_BYTES = {
    *Memory._fields,
    "memory",
    "peak",
    "checkpoint",
    "checkpoints",
    "bytes_of_all_tokens",
    "dataset_bytes",
}


def print_plan(config: PlanConfig) -> None:
    """Print the plan as a table, and what to change."""
    figures = plan_run(config)
    target = find_target(config)
    # The figures, a section of rows after the other.
    dtype = str(target.compute.dtype).removeprefix("torch.")
    title = f"{config.n_device} x {target.name} in {dtype}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for section, values in figures.items():
        for number, (key, value) in enumerate(values.items()):
            name = key.replace("_", " ").replace("seconds", "time")
            table.add_row("" if number else section, name, format_figure(key, value))
        table.add_section()
    console.print(table)
    # What to change: too many epochs, too little memory, shares that differ, an unknown time.
    if config.data.mixture is None:
        warn_of_epochs(figures["disk"].get("dataset_epochs", 0))
    most = figures["memory"]["largest_micro_batch"]
    micro_batch = figures["step"]["micro_batch"]
    if most == 0:
        say(
            "not even one sequence fits: use a smaller model or seq_len, or "
            "runtime.strategy=fsdp on several devices"
        )
    elif most is not None and micro_batch > most:
        say(f"runtime.micro_batch={micro_batch} does not fit: use {most}")
    n_groups = config.n_device // config.runtime.context_parallel
    if config.batch_size % n_groups:
        share = config.share_of(config.n_device)
        sharers = "devices" if n_groups == config.n_device else "groups of devices"
        say(
            f"{config.batch_size:,} sequences do not divide among {n_groups:,} {sharers}, and some "
            f"wait for those with {share:,}: make batch_tokens a multiple of "
            f"{n_groups * config.seq_len:,}"
        )
    if math.isnan(figures["time"]["seconds"]):
        say(
            "for the time, give mfu=... (for a known GPU) or tokens_per_second=... (per device), "
            "which scripts/bench.py what=train measures"
        )


def format_figure(key: str, value: float | None) -> str:
    """Return a figure as people read it, by its name."""
    if value is None or math.isnan(value):
        return "unknown"
    if key in _BYTES:
        return format_bytes(value)
    if key.startswith("seconds"):
        return format_duration(value)
    if key == "mfu":
        return f"{100 * value:.3g} %"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= value < 1e15 else f"{value:.4g}"
    for unit, size in (("T", 1e12), ("B", 1e9)):
        if size <= value < 1e15:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,}" if value < 1e9 else f"{value:.2e}"


def format_bytes(n_bytes: float) -> str:
    """In GB (1e9 bytes), or in MB if below 0.1 GB."""
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:,.2f} MB"


def format_duration(seconds: float) -> str:
    """In seconds, minutes, hours or days."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} seconds"
