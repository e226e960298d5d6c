"""scripts/bench.py: measures what it is asked for, prints a table of each, and writes all figures to one file."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from pydantic_core import to_jsonable_python

from common.console import say
from common.files import make_directory, write_json
from common.settings import UserError
from tools.bench import data, decode, operators, train
from tools.bench.harness import Row, machine, print_table

MEASURES: dict[str, tuple[Callable[[Any], dict[str, list[Row]]], str]] = {
    "operators": (operators.measure, "operators; x: how many times as fast as the first of their kind"),
    "train": (train.measure, "training steps of {batch} x {seq_len} tokens; x: speed, relative to the first row"),
    "decode": (decode.measure, "decoding in float32; x: speed, relative to the first row of the same position"),
    "data": (data.measure, "preparing a dataset; x: speed, relative to the library with as many workers"),
}
"""What measures each kind, as tables by name, and the title of the first table."""


def bench(**given: Any) -> None:
    """Measure each kind of `what` in turn, and write the file `out` anew after each.

    Raises:
        UserError: there is no GPU.
    """
    options = SimpleNamespace(**given)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but torch sees no GPU here: use device=cpu")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {"options": to_jsonable_python(given), "machine": machine()}
    for what in options.what:
        measure, title = MEASURES[what]
        tables = measure(options)
        for name, rows in tables.items():
            print_table(title.format_map(given) if name == what else name, rows)
        found |= tables
        if options.out is not None:
            make_directory(options.out.absolute().parent, "out")
            write_json(options.out, found)
            say(f"written to {options.out}")
