"""Predicts the memory, time and disk space of a training run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from rich.table import Table

from common.console import console, say
from common.memory import available_memory
from common.settings import JsonDict, UserError
from data.shards import read_manifest, token_dtype
from model.gpt import GPT
from runtime.device import Runtime, is_bfloat16_fast
from runtime.gpus import DEVICES, device_by_name, device_of_gpu
from tools.bench.train import measure_rate
from trainer.config import TrainConfig
from trainer.memory import Memory, memory_of
from trainer.micro_batch import SPARE, largest


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
    measure: bool
    """Run a few steps on this machine, and use their rate."""
    output: Literal["table", "json"]
    """Output format."""

    @property
    def share(self) -> int:
        """Maximum number of sequences per device and step."""
        return self.share_of(self.n_device)

    @model_validator(mode="after")
    def _plan_fits(self) -> "PlanConfig":
        if self.n_device % (together := self.runtime.context_parallel):
            raise ValueError(
                f"runtime.context_parallel={together} does not divide n_device={self.n_device}"
            )
        if self.batch_size * together < self.n_device:
            has = f"batch_tokens={self.batch_tokens} is {self.batch_size} sequences"
            raise ValueError(
                f"{has}, fewer than n_device={self.n_device}: lower n_device, or raise batch_tokens"
            )
        rates = {
            "mfu": self.mfu,
            "tokens_per_second": self.tokens_per_second,
            "measure": self.measure or None,
        }
        given = [name for name, value in rates.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both set the rate: give only one")
        return self


class Target(NamedTuple):
    """The device that a run is planned for."""

    name: str
    runtime: Runtime
    """Kind of device, and dtype."""
    memory: float | None
    """Bytes of one device; None: unknown."""
    peak: float | None
    """FLOP/s of one device in the dtype of the run; None: unknown."""
    source: str


def plan(config: PlanConfig) -> JsonDict:
    """All figures for the JSON output, in bytes, seconds and tokens. None means unknown.

    Raises:
        UserError: the plan needs a device that this machine does not have.
    """
    target = find_target(config)
    with torch.device("meta"):
        gpt = GPT(config.model)
    run = config, target.runtime, config.n_device
    most = None  # unknown; 0: not even one sequence fits
    if target.memory is not None:
        room = target.memory * (1 - SPARE)
        most = largest(lambda size: memory_of(gpt, *run, size).peak <= room, config.share)
    wanted = config.runtime.micro_batch
    micro_batch = min(most or 1 if wanted == "auto" else wanted, config.share)
    memory = memory_of(gpt, *run, micro_batch)
    flops = gpt.flops_per_token(config.seq_len)
    return {
        "device": {
            "name": target.name,
            "n": config.n_device,
            "memory": target.memory,
            "peak_flops": target.peak,
        }
        | {"dtype": str(target.runtime.dtype).removeprefix("torch."), "source": target.source},
        "model": {"parameters": gpt.n_params(), "flops_per_token": flops},
        "step": {
            "tokens": config.batch_tokens,
            "sequences": config.batch_size,
            "seq_len": config.seq_len,
        }
        | {"sequences_per_device": config.share, "micro_batch": micro_batch}
        | {"micro_batches": -(-config.share // micro_batch)},
        "memory": memory._asdict() | {"peak": memory.peak, "largest_micro_batch": most},
        "time": time_of(config, target, flops, micro_batch),
        "disk": disk_of(
            config,
            round(gpt.n_params() * target.runtime.param_dtype.itemsize * (1 + config.means(gpt))),
        ),
    }


def find_target(config: PlanConfig) -> Target:
    """The requested device, or this machine's.

    Raises:
        UserError: the plan needs a device that this machine does not have, or none knows.
    """
    device, wanted = config.device, config.runtime.device
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if device == "auto" and (wanted == "cpu" or gpu is None):
        if wanted == "cuda":
            raise UserError(
                "runtime.device=cuda, but there is no GPU here: name one, such as device=a100-40gb"
            )
        device = "cpu"
    here = device_of_gpu(gpu) if gpu else None
    known = here if device == "auto" else device_by_name(device)
    if device not in ("auto", "cpu") and known is None:
        names = ", ".join(device.name for device in DEVICES)
        raise UserError(f"device={device} is unknown: give auto, cpu or one of {names}")
    if config.measure and device not in ("auto", "cpu") and (known is None or known != here):
        raise UserError(
            f"measure=true measures this machine, which has no {device}: leave out measure or "
            "device"
        )
    dtype, where = config.runtime.dtype, torch.device("cpu" if device == "cpu" else "cuda")
    if dtype == "auto":
        fast = known.bfloat16 is not None if known else is_bfloat16_fast(where)
        dtype = "bfloat16" if fast else "float32"
    runtime = Runtime(where, getattr(torch, dtype), config.runtime.sequence_chunk)
    if device == "cpu":
        return Target(
            "cpu",
            runtime,
            available_memory(),
            None,
            "this machine's memory; no data sheet has a CPU's peak",
        )
    if known is not None:
        return Target(
            known.name, runtime, known.memory * 1e9, known.peak(runtime.dtype), "NVIDIA data sheet"
        )
    return Target(str(gpu), runtime, float(torch.cuda.mem_get_info()[1]), None, "unknown")


def time_of(config: PlanConfig, target: Target, flops: int, micro_batch: int) -> JsonDict:
    """Steps and tokens, and their duration at the given or measured rate."""
    tokens = config.tokens(config.last_step)
    rate = config.tokens_per_second
    if config.measure:
        say(f"measuring a few steps on {target.runtime}")
        runtime = config.runtime.model_copy(update={"device": target.runtime.device.type})
        rate = measure_rate(
            config.model_copy(update={"runtime": runtime}), micro_batch, config.share
        )
    elif config.mfu is not None and target.peak is not None:
        rate = config.mfu * target.peak / flops
    seconds = tokens / (rate * config.n_device) if rate else None
    at_peak = tokens * flops / (target.peak * config.n_device) if target.peak else None
    return {
        "steps": config.last_step,
        "tokens": tokens,
        "flops": tokens * flops,
        "tokens_per_second": rate and rate * config.n_device,
        "mfu": rate * flops / target.peak if rate and target.peak else None,
        "seconds": seconds,
        "device_hours": seconds and seconds * config.n_device / 3600,
        "seconds_at_peak": at_peak,
    }


def disk_of(config: PlanConfig, checkpoint: int) -> JsonDict:
    """Bytes of a checkpoint, of all kept checkpoints, and of the dataset."""
    keep = config.checkpoint
    saved = -(-config.last_step // keep.every)
    kept = min(
        saved, keep.keep_last + 1 + (config.last_step // keep.keep_every if keep.keep_every else 0)
    )  # 1: best
    tokens = config.tokens(config.last_step)
    dataset: JsonDict = {"tokens": None, "bytes": None, "epochs": None}
    if config.dataset_dir is not None:
        train = read_manifest(config.dataset_dir).splits["train"].total
        size = sum(file.stat().st_size for file in config.dataset_dir.iterdir() if file.is_file())
        dataset = {"tokens": train.tokens, "bytes": size, "epochs": tokens / max(1, train.tokens)}
    return {
        "checkpoint": checkpoint,
        "checkpoints": checkpoint * kept,
        "checkpoints_kept": kept,
        "dataset": dataset,
        "bytes_of_all_tokens": tokens * token_dtype(config.model.n_vocab).itemsize,
    }


_UNKNOWN = "unknown"
_BYTES = {
    *Memory._fields,
    "memory",
    "peak",
    "checkpoint",
    "checkpoints",
    "bytes_of_all_tokens",
    "dataset_bytes",
}


def run_plan(config: PlanConfig) -> None:
    """Print the plan as a table or as JSON."""
    console.quiet = config.output == "json"
    found = plan(config)
    if config.output == "json":
        print(json.dumps(found, indent=2))
        return
    console.print(table_of(found))
    for hint in hints(config, found):
        say(hint)


def table_of(found: JsonDict) -> Table:
    """The plan's figures, with the names that they have as JSON."""
    device = found["device"]
    title = f"{device['n']} x {device['name']} in {device['dtype']} ({device['source']})"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    disk = dict(found["disk"])
    disk |= {
        f"dataset_{key}": value for key, value in disk.pop("dataset").items() if value is not None
    }
    for section, figures in (
        found | {"device": {"memory": device["memory"]}, "disk": disk}
    ).items():
        for number, (key, value) in enumerate(figures.items()):
            name = key.replace("_", " ").replace("seconds", "time")
            table.add_row("" if number else section, name, as_text(key, value))
        table.add_section()
    return table


def as_text(key: str, value: float | None) -> str:
    """Return a figure as people read it, by its name."""
    if value is None:
        return _UNKNOWN
    if key in _BYTES:
        return gigabytes(value)
    if key.startswith("seconds"):
        return duration(value)
    if key == "mfu":
        return f"{100 * value:.3g} %"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= value < 1e15 else f"{value:.4g}"
    for unit, size in (("T", 1e12), ("B", 1e9)):
        if size <= value < 1e15:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,}" if value < 1e9 else f"{value:.2e}"


def hints(config: PlanConfig, found: JsonDict) -> Iterator[str]:
    """Yield lines that say what to change in the command, to learn more or because something does
    not fit."""
    n_groups = config.n_device // config.runtime.context_parallel
    if config.batch_size % n_groups:
        yield (
            f"{config.batch_size:,} sequences do not divide among {n_groups:,} devices, and some "
            f"wait for those with {config.share:,}: make batch_tokens a multiple of "
            f"{n_groups * config.seq_len:,}"
        )
    chosen, largest = found["step"]["micro_batch"], found["memory"]["largest_micro_batch"]
    if largest == 0:
        yield (
            "not even one sequence fits: use a smaller model or seq_len, or "
            "runtime.strategy=fsdp on several devices"
        )
    elif largest is not None and chosen > largest:
        yield f"runtime.micro_batch={chosen} does not fit: use {largest}"
    if found["time"]["seconds"] is None:
        here = (
            ", or measure=true to run a few steps here" if config.device in ("auto", "cpu") else ""
        )
        yield (
            "for the time, give mfu=... (for a known device) or tokens_per_second=... (per "
            f"device){here}"
        )


def gigabytes(n_bytes: float | None) -> str:
    """In GB (1e9 bytes), or in MB if below 0.1 GB."""
    if n_bytes is None:
        return _UNKNOWN
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:,.2f} MB"


def duration(seconds: float) -> str:
    """In seconds, minutes, hours or days."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            amount = seconds / size
            return f"{amount:,.1f} {unit}" if amount < 1e9 else f"{amount:.4g} {unit}"
    return f"{seconds:.1f} seconds"
