"""scripts/bench.py: measures, prints a table of each kind, and writes all figures to one file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt

from common.command_line import Items
from common.console import say
from common.files import make_directory, refuse_foreign, write_json
from common.settings import JsonDict, Settings, UserError
from tools.bench import decoding, operators, preparation, training
from tools.bench.measuring import describe_machine, print_table

MEASURES: dict[str, tuple[Callable[[Any], list[JsonDict]], str]] = {
    "operators": (operators.measure_operators, "operators; x: how many times as fast as the first"),
    "train": (
        training.measure_training,
        "training steps of {batch} x {seq_len} tokens; x: speed, relative to the first row",
    ),
    "decode": (
        decoding.measure_decoding,
        "decoding in float32; x: speed, relative to the first row of the same position",
    ),
    "data": (
        preparation.measure_preparation,
        "preparing a dataset; x: speed, relative to the tokenizer in as many threads",
    ),
}
"""What measures each kind, and the title of its table."""


class BenchConfig(Settings, defaults="bench"):
    """Options of scripts/bench.py."""

    what: Items[Literal["operators", "train", "decode", "data"]] = Field(min_length=1)
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


def run_benchmarks(options: BenchConfig) -> None:
    """Measure each kind of `what` in turn, and write the file `out` anew after each.

    Raises:
        UserError: there is no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise UserError("device=cuda, but torch sees no GPU here: use device=cpu")
    if options.device == "auto":
        options = options.model_copy(update={"device": "cuda" if has_gpu else "cpu"})
    if options.out is not None:
        make_directory(options.out.absolute().parent, "out")
        refuse_foreign(b'"machine"', options.out)
    settings = options.model_dump(mode="json")
    figures: JsonDict = {"options": settings, "machine": describe_machine()}
    for what in options.what:
        measure, title = MEASURES[what]
        say(f"measuring {what} ...")
        figures[what] = measure(options)
        print_table(title.format_map(settings), figures[what])
        if options.out is not None:
            write_json(options.out, figures)
            say(f"written to {options.out}")
