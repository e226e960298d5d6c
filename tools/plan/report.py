"""Prints a plan as a table or as JSON."""

import json
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from common.console import console, say
from common.settings import nearest
from tools.plan.plan import PlanConfig, plan
from trainer.devices import DEVICES
from trainer.memory import Memory

_UNKNOWN = "unknown"
_BYTES = {*Memory._fields, "memory", "peak", "checkpoint", "checkpoints", "bytes_of_all_tokens", "dataset_bytes"}


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
    """The plan's figures, with the names that they have as JSON."""
    device = found["device"]
    title = f"{device['n']} x {device['name']} in {device['dtype']} ({device['source']})"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    dataset = {f"dataset_{key}": value for key, value in found["disk"]["dataset"].items() if value is not None}
    sections = found | {"device": {"memory": device["memory"]}, "disk": found["disk"] | dataset | {"dataset": None}}
    for section, figures in sections.items():
        for number, (key, value) in enumerate(figures.items()):
            if key != "dataset":
                table.add_row(
                    "" if number else section, key.replace("_", " ").replace("seconds", "time"), as_text(key, value)
                )
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
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    for unit, size in (("T", 1e12), ("B", 1e9)):
        if size <= value < 1e15:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,}" if value < 1e9 else f"{value:.2e}"


def hints(config: PlanConfig, found: dict[str, Any]) -> Iterator[str]:
    """Yield lines that say what to change in the command, to learn more or because something does not fit."""
    names, name = [device.name for device in DEVICES], found["device"]["name"]
    if found["device"]["source"] == _UNKNOWN:
        meant = nearest(name.lower(), names)
        what = meant if meant.endswith("?") else f"give one of {', '.join(names)}, cpu"
        yield f"device={name} is not in the table of devices: {what}"
    chosen, largest = found["step"]["micro_batch"], found["memory"]["largest_micro_batch"]
    if largest == 0:
        yield "not even one sequence fits: use a smaller model or seq_len, or runtime.strategy=fsdp on several devices"
    elif largest is not None and chosen > largest:
        yield f"runtime.micro_batch={chosen} does not fit: use {largest}"
    if found["time"]["seconds"] is None:
        here = ", or measure=true to run a few steps here" if config.device in ("auto", "cpu") else ""
        yield f"for the time, give mfu=... (for a known device) or tokens_per_second=... (per device){here}"


def gigabytes(n_bytes: float | None) -> str:
    """In GB (1e9 bytes), or in MB if below 0.1 GB."""
    if n_bytes is None:
        return _UNKNOWN
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:,.2f} MB"


def duration(seconds: float) -> str:
    """In seconds, minutes, hours or days."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} seconds"
