"""Measure decoding: tokens per second at several positions of a text, and bytes of the state that it takes.

    python scripts/bench_decode.py                                    # log_gpt_1m
    python scripts/bench_decode.py models=gpt2_124m hf=gpt2_124m      # beside Hugging Face's GPT-2 with its cache
    python scripts/bench_decode.py models=gpt2_124m attention=all     # every mechanism in that shape

Weights and tokens are random. A model reads a few tokens, and repeating the last column of its cache stretches the
state to a position: time depends on shapes alone, so this costs what a text would. From there it decodes on, each step
from the state that the step before has left. All positions and both libraries take turns, step by step, in random
order, so that whatever else the machine does slows all of them.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from cli import CONFIGS, compose, to_dict
from common.command import Items, run_script
from common.files import make_directory
from common.settings import Settings


class Options(Settings):
    models: Items[str] = ["log_gpt_1m"]
    """files of configs/model"""
    attention: Items[str] = []
    """files of configs/model/attention for each model, or all; []: each model's own"""
    set: Items[str] = []
    """options of train.py for all models, such as model.n_layer=2"""
    positions: Items[PositiveInt] = [1_000, 8_000, 64_000]
    """tokens before the first decoded one"""
    steps: PositiveInt = 50
    """timed steps, each one position further: few, compared to the positions"""
    hf: str | None = None
    """a file of configs/model: measures Hugging Face's GPT-2 of this shape, too"""
    out: Path = Path("runs/bench_decode")
    """folder for bench.json"""


def run(options: Options) -> None:
    from tools.bench.decode import Terms, bench  # imports torch, which --help does not need
    from tools.bench.harness import write_results

    out = make_directory(options.out, "out")
    attentions = [[f"model/attention={name}"] for name in files("model/attention", options.attention)] or [[]]
    models = {
        ", ".join([model, *(name.partition("=")[2] for name in attention)]): composed(model, [*attention, *options.set])
        for model, attention in itertools.product(files("model", options.models), attentions)
    }
    hf = (options.hf, composed(options.hf, options.set)) if options.hf else None
    found = bench(models, Terms(sorted({*options.positions}), options.steps, hf))
    write_results(out, options, found)


def files(group: str, names: list[str]) -> list[str]:
    """Return the names, or those of every file in this folder of configs/ if they are ["all"]."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")) if names == ["all"] else names


def composed(model: str, overrides: list[str]) -> dict[str, Any]:
    """Compose the configuration of a run with this model and these options; no data is read."""
    return to_dict(compose("train", [f"model={model}", *overrides, "dataset_dir=none"]))


if __name__ == "__main__":
    sys.exit(run_script(__doc__, Options, run))
