"""scripts/bench.py: measures what it is asked for, prints a table of each, and writes all figures
to one file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt

from common.command_line import Items
from common.console import count, say
from common.files import make_directory, refuse_foreign, write_json
from common.settings import JsonDict, Settings, UserError
from tools.bench import data, decode, operators, train
from tools.bench.harness import Row, failures, machine, print_table

MEASURES: dict[str, tuple[Callable[[Any], dict[str, list[Row]]], str]] = {
    "operators": (operators.measure, "operators; x: how many times as fast as the first"),
    "train": (
        train.measure,
        "training steps of {batch} x {seq_len} tokens; x: speed, relative to the first row",
    ),
    "decode": (
        decode.measure,
        "decoding in float32; x: speed, relative to the first row of the same position",
    ),
    "data": (
        data.measure,
        "preparing a dataset; x: speed, relative to the library with as many workers",
    ),
    "tuning": (
        operators.measure_tuning,
        "log attention with gates by launch parameters; x: speed, relative to those in use",
    ),
}
"""What measures each kind, as tables by name, and the title of the first table."""


class BenchConfig(Settings, defaults="bench"):
    """Options of scripts/bench.py."""

    what: Items[Literal["operators", "train", "decode", "data", "tuning"]] = Field(min_length=1)
    profile: bool
    device: Literal["auto", "cpu", "cuda"]
    rounds: PositiveInt
    out: Path | None
    lengths: Items[PositiveInt] = Field(min_length=1)
    heads: PositiveInt
    head_dim: PositiveInt
    seconds: NonNegativeFloat
    batch: PositiveInt
    models: Items[str] = Field(min_length=1)
    set: Items[str]
    seq_len: PositiveInt
    steps: PositiveInt
    nanogpt: Path | None
    positions: Items[PositiveInt] = Field(min_length=1)


def bench(options: BenchConfig) -> None:
    """Measure each kind of `what` in turn, and write the file `out` anew after each.

    Raises:
        UserError: there is no GPU, or a contender fails; the others have been measured.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but torch sees no GPU here: use device=cpu")
    if options.device == "auto":
        options = options.model_copy(
            update={"device": "cuda" if torch.cuda.is_available() else "cpu"}
        )
    if options.out is not None:
        make_directory(options.out.absolute().parent, "out")
        refuse_foreign(b'"machine"', options.out)
    given = options.model_dump(mode="json")
    found: JsonDict = {"options": given, "machine": machine()}
    for what in options.what:
        measure, title = MEASURES[what]
        tables = measure(options)
        for name, rows in tables.items():
            print_table(title.format_map(given) if name == what else name, rows)
        found |= tables
        if options.out is not None:
            write_json(options.out, found | {"failures": failures})
            say(f"written to {options.out}")
    if failures:
        raise UserError(
            f"{count(len(failures), 'contender')} failed: {', '.join(failures)}; lines above say "
            "why"
        )
