"""Measure decoding: tokens per second at several positions of a text, and bytes of the state that it takes.

    python scripts/bench_decode.py                                       # log_gpt_1m
    python scripts/bench_decode.py --models gpt2_124m --hf               # beside Hugging Face's GPT-2 with its cache
    python scripts/bench_decode.py --models gpt2_124m --attention all    # every mechanism in that shape

Weights and tokens are random, and nobody reads 64,000 of them: a model reads a few, and the state after these is
stretched to a position by repeating a cache's last column, which costs what a text would, since time depends on shapes
alone. From there it decodes on, each step from the state that the step before has left. All positions and both
libraries take turns, step by step, in random order: whatever else the machine does hits all alike.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from cli import CONFIGS, compose, to_dict
from common.command import parser_of, positive, run_script
from common.console import say
from common.files import make_directory, write_json
from common.settings import UserError, nearest


def main() -> int:
    """Parse the command line and measure."""
    return run_script(parser(), run)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    known = parser_of(__doc__)
    add = known.add_argument
    add("--models", nargs="+", default=["log_gpt_1m"], help="files of configs/model")
    add("--attention", nargs="+", help="files of configs/model/attention in each, or all; else each model's own")
    add("--set", nargs="*", default=[], help="options for all of them: model.n_layer=2")
    add("--positions", nargs="+", type=positive, default=[1_000, 8_000, 64_000], help="tokens before")
    add("--steps", type=positive, default=50, help="timed steps, each a position further: few beside --positions")
    add("--hf", nargs="?", const="gpt2_124m", metavar="MODEL", help="beside Hugging Face's GPT-2 of this model's shape")
    add("--out", type=Path, default=Path("runs/bench_decode"))
    return known


def run(options: argparse.Namespace) -> None:
    """Compose the models, measure and print, write bench.json."""
    from tools.bench.decode import Terms, bench  # imports torch, which --help need not wait for

    out = make_directory(options.out, "--out")
    models = {label: composed(overrides) for label, overrides in contenders(options).items()}
    hf = (options.hf, composed([f"model={chosen('model', [options.hf])[0]}", *options.set])) if options.hf else None
    found = bench(models, Terms(sorted(set(options.positions)), options.steps, hf))
    write_json(out / "bench.json", {"options": {k: str(v) for k, v in vars(options).items()}, **found})
    say(f"written to {out / 'bench.json'}")


def contenders(options: argparse.Namespace) -> dict[str, list[str]]:
    """Options that compose each model, by what it is called in the tables."""
    models = chosen("model", options.models)
    if options.attention is None:
        return {model: [f"model={model}", *options.set] for model in models}
    pairs = itertools.product(models, chosen("model/attention", options.attention))
    return {f"{model}, {name}": [f"model={model}", f"model/attention={name}", *options.set] for model, name in pairs}


def chosen(group: str, names: list[str]) -> list[str]:
    """These files of a folder of configs/, or all there are."""
    there = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    if names == ["all"]:
        return there
    for name in names:
        if name not in there:
            raise UserError(f"{group}={name} does not exist: {nearest(name, there)}")
    return names


def composed(overrides: list[str]) -> dict[str, Any]:
    """The configuration of a run with these options; no data is read."""
    return to_dict(compose("train", [*overrides, "dataset_dir=none"]))


if __name__ == "__main__":
    sys.exit(main())
