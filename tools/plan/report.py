"""Prints a plan as a table or as JSON."""

import json
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from common.console import console, say
from common.settings import nearest
from tools.plan.plan import PlanConfig, plan
from trainer.devices import DEVICES

_UNKNOWN = "unknown"


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


def table_of(found: dict[str, Any]) -> Table:
    """The plan's figures in sections: model, memory, time, disk."""
    device = found["device"]
    title = f"{device['n']} x {device['name']} in {device['dtype']} ({device['source']})"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for rows in (_model, _memory, _time, _disk):
        for row in rows(found):
            table.add_row(*row)
        table.add_section()
    return table


def hints(config: PlanConfig, found: dict[str, Any]) -> Iterator[str]:
    """Lines that say what to change in the command, to learn more or because something does not fit."""
    names = [device.name for device in DEVICES]
    if found["device"]["source"] == _UNKNOWN:
        name = found["device"]["name"]
        alike = [known for known in names if known.startswith(name.lower())]
        meant = f"did you mean {' or '.join(alike)}?" if alike else nearest(name, names)
        yield f"device={name} is not in the table of devices: {meant} Known: {', '.join(names)}, cpu"
    chosen, largest = found["step"]["micro_batch"], found["memory"]["largest_micro_batch"]
    if largest == 0:
        yield "not even one sequence fits: use a smaller model or seq_len, or runtime.strategy=fsdp on several devices"
    elif largest is not None and chosen > largest:
        yield f"runtime.micro_batch={chosen} does not fit: use {largest}"
    if found["time"]["seconds"] is None:
        here = ", or measure=true to run a few steps here" if config.device in ("auto", "cpu") else ""
        yield f"for the time, give mfu=... (for a known device) or tokens_per_second=... (per device){here}"


def _model(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    model, step = found["model"], found["step"]
    yield "parameters", f"{model['parameters']:,}", ""
    yield "FLOPs per token", engineering(model["flops_per_token"]), "forward and backward"
    yield "tokens per step", f"{step['tokens']:,}", f"{step['sequences']:,} x {step['seq_len']:,}"
    yield "micro-batches", f"{step['micro_batches']:,}", f"of {step['micro_batch']} sequences at most, on each device"


def _memory(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    memory, device, step = found["memory"], found["device"], found["step"]
    sent = memory["gradients"] > memory["weights"]
    yield "weights", gigabytes(memory["weights"]), ""
    yield "gradients", gigabytes(memory["gradients"]), "whole, and the parts that are sent" if sent else ""
    yield "optimizer", gigabytes(memory["optimizer"]), "running means"
    yield "activations", gigabytes(memory["activations"]), "kept for a micro-batch's backward pass"
    yield "working memory", gigabytes(memory["working"]), "logits, or gradients of a layer"
    room = f"memory of the device: {gigabytes(device['memory'])}"
    yield "[bold]peak[/]", f"[bold]{gigabytes(memory['peak'])}[/]", room
    largest = _UNKNOWN if memory["largest_micro_batch"] is None else f"{memory['largest_micro_batch']:,}"
    yield "largest micro-batch", largest, f"of up to {step['share']:,}, leaving 5 % free"


def _time(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    times = found["time"]
    yield "steps", f"{times['steps']:,}", f"{engineering(times['tokens'])} tokens, {engineering(times['flops'])} FLOPs"
    if times["seconds"] is None:
        least = times["seconds_at_peak"]
        yield "time", _UNKNOWN, f"at least {duration(least)}, at the devices' peak" if least else ""
        return
    mfu = f", {100 * times['mfu']:.3g} % of the peak" if times["mfu"] else ""
    yield "rate", f"{times['tokens_per_second']:,.0f}", f"tokens per second{mfu}"
    yield "[bold]time[/]", f"[bold]{duration(times['seconds'])}[/]", f"{times['device_hours']:,.1f} device-hours"


def _disk(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    disk, data = found["disk"], found["disk"]["dataset"]
    yield "a checkpoint", gigabytes(disk["checkpoint"]), "weights and optimizer"
    yield "checkpoints", gigabytes(disk["checkpoints"]), f"{disk['checkpoints_kept']} are kept at most"
    if data["bytes"] is None:
        yield "dataset", gigabytes(disk["bytes_of_all_tokens"]), "if no token is seen twice"
    else:
        seen = f"{engineering(data['tokens'])} tokens, seen {data['passes']:.2g} times"
        yield "dataset", gigabytes(data["bytes"]), seen


def gigabytes(n_bytes: float | None) -> str:
    """In GB (1e9 bytes), or in MB if below 0.1 GB."""
    if n_bytes is None:
        return _UNKNOWN
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:,.2f} MB"


def engineering(number: float) -> str:
    """Such as 1,234 or 294.9 B; from 1e15 on, in scientific notation."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if size <= number < 1e15:
            return f"{number / size:,.1f} {unit}"
    return f"{number:,.0f}" if number < 1e6 else f"{number:.2e}"


def duration(seconds: float) -> str:
    """In seconds, minutes, hours or days."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} seconds"
