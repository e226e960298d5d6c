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
import importlib
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from cli import CONFIGS, compose, to_dict
from common.command import parser_of, run_script
from common.console import console, say
from common.files import make_directory, write_json
from common.settings import UserError, decode, nearest
from model.attention.base import Attention
from model.attention.cache import KVCache, SparseCache
from model.gpt import GPT, GPTConfig, GPTState
from model.ops.sparse_attention import Pattern, needed_keys
from trainer.runtime import DeviceConfig, open_runtime

WARM_UP = 3  # steps that are not timed; a stretched cache is copied in the first
READ = 8  # tokens before a state is stretched
BYTES_AT = (1_000, 32_000, 1_000_000)  # tokens that states are sized at

Row = dict[str, Any]
Decode = Callable[[Tensor], Tensor]
"""One more token (1, 1) -> its logits (1, 1, n)."""


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and measure."""
    return run_script(parser(), bench, argv)


def bench(options: argparse.Namespace) -> None:
    """Measure, print tables, write bench.json."""
    out = make_directory(options.out, "--out")
    figures = {}
    for label, overrides in contenders(options).items():
        figures[label] = measure(overrides, options)
        say(f"{label}: {', '.join(rates(figures[label]))} tokens per second")
    found = {
        "options": {name: str(value) for name, value in vars(options).items()},
        "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "models": figures,
    }
    write_json(out / "bench.json", found)
    title = f"tokens per second, float32, medians of {options.steps} steps"
    title += f"; x: times Hugging Face's GPT-2 of {options.hf}'s shape" if options.hf else ""
    columns = (f"at {at:,}" for at in sorted(set(options.positions)))
    console.print(table(title, columns, {name: rates(figure) for name, figure in figures.items()}))
    sizes = {name: [f"{figure['bytes'][str(at)]:,}" for at in BYTES_AT] for name, figure in figures.items()}
    console.print(table("bytes of state", (f"after {at:,}" for at in BYTES_AT), sizes))
    say(f"written to {out / 'bench.json'}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    known = parser_of(__doc__)
    add = known.add_argument
    add("--models", nargs="+", default=["log_gpt_1m"], help="files of configs/model")
    add("--attention", nargs="+", help="files of configs/model/attention in each, or all; else each model's own")
    add("--set", nargs="*", default=[], help="options for all of them: model.n_layer=2")
    add("--positions", nargs="+", type=_positive, default=[1_000, 8_000, 64_000], help="tokens before")
    add("--steps", type=_positive, default=50, help="timed steps, each a position further: few beside --positions")
    add("--hf", nargs="?", const="gpt2_124m", metavar="MODEL", help="beside Hugging Face's GPT-2 of this model's shape")
    add("--out", type=Path, default=Path("runs/bench_decode"))
    return known


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


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


@torch.inference_mode()
def measure(overrides: list[str], options: argparse.Namespace) -> Row:
    """One model's speed at each position, beside Hugging Face's if that is asked for, and its bytes."""
    positions = sorted(set(options.positions))
    room = positions[-1] + WARM_UP + options.steps
    config, device = configuration(overrides, room)
    gpt = GPT(config).to(device)
    _, state = gpt(random_tokens(gpt, READ), return_state=True)
    decoders: dict[tuple[str, int], Decode] = {("ours", at): Ours(gpt, stretched(gpt, state, at)) for at in positions}
    if options.hf:
        gpt2 = build_hf([f"model={chosen('model', [options.hf])[0]}", *options.set], room)
        decoders |= {("hf", at): hugging_face(gpt2, at) for at in positions}
    rate = {key: 1 / seconds for key, seconds in time_steps(gpt, decoders, options.steps).items()}
    rows = [{"position": at, "tokens_per_second": rate["ours", at]} for at in positions]
    for row in rows if options.hf else []:
        theirs = rate["hf", row["position"]]
        row |= {"hf_tokens_per_second": theirs, "over_hf": row["tokens_per_second"] / theirs}
    sizes = {at: state_bytes(stretched(gpt, state, at)) for at in {*positions, *BYTES_AT}}
    return {"speed": rows, "bytes": {str(at): sizes[at] for at in sorted(sizes)}}


def configuration(overrides: list[str], max_len: int) -> tuple[GPTConfig, torch.device]:
    """A model for texts of `max_len` tokens at least, and where it runs."""
    composed = to_dict(compose("train", [*overrides, "dataset_dir=none"]))
    if composed["model"]["position"]["name"] == "learned":
        composed["model"]["position"]["max_len"] = max(max_len, composed["model"]["position"]["max_len"])
    runtime = open_runtime(DeviceConfig(device=composed["runtime"]["device"], dtype="float32"))
    torch.manual_seed(0)
    return decode(GPTConfig, composed["model"]), runtime.device


def build_hf(overrides: list[str], max_len: int) -> Any:
    """Hugging Face's GPT-2 of the shape of one of our models, with random weights, in float32."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise UserError("--hf needs the package transformers, which is not installed: pip install -e '.[hf]'") from None
    config, device = configuration(overrides, max_len)
    if config.n_head * config.head_features != config.n_embd:
        raise UserError(f"head_dim={config.head_dim} is not GPT-2's, whose heads share n_embd evenly: set it to null")
    shape = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd")}
    shape |= {"vocab_size": config.n_vocab_padded, "n_positions": max_len}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).to(device).eval()


class Ours:
    """Decodes on from a state."""

    def __init__(self, gpt: GPT, state: Any) -> None:
        self.gpt, self.state = gpt, state

    def __call__(self, token_ids: Tensor) -> Tensor:
        """One more token."""
        logits, self.state = self.gpt(token_ids, self.state, return_state=True)
        return logits


def hugging_face(gpt2: Any, position: int) -> Decode:
    """The same for theirs, with a DynamicCache that is stretched to this position."""
    cache = gpt2(torch.zeros(1, READ, dtype=torch.long, device=gpt2.device), use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = _columns(layer.keys, position), _columns(layer.values, position)
    return lambda token_ids: gpt2(token_ids, past_key_values=cache, use_cache=True).logits  # it changes the cache


def stretched(gpt: GPT, state: GPTState, n: int) -> GPTState:
    """A state as after n tokens read at once. Keys and values take no memory of their own until a token is appended."""
    mechanisms = [module for module in gpt.modules() if isinstance(module, Attention)]
    layers = (
        _stretched(layer, n, getattr(mechanism, "patterns", []))
        for layer, mechanism in zip(state.layers, mechanisms, strict=True)
    )
    return GPTState(_stretched(state.position, n, []), tuple(layers))


def _stretched(state: Any, n: int, patterns: list[Pattern]) -> Any:
    """The same of a layer with these patterns, if it has any."""
    if isinstance(state, KVCache):
        return KVCache(_columns(state.k, n), _columns(state.v, n), (n,) * len(state.lengths))
    if isinstance(state, SparseCache):
        j = torch.arange(n, device=state.k.device)
        kept = j[needed_keys(patterns, j, torch.tensor(n, device=j.device))]
        place = (1 + kept).to(torch.int32).expand(len(state.lengths), 1, -1)
        k, v = (_columns(x, len(kept)) for x in (state.k, state.v))
        return SparseCache(k, v, place, (n,) * len(state.lengths))
    if not isinstance(state, tuple):
        return n if isinstance(state, int) else state  # a count of tokens; else nothing, or always as large
    parts: Any = (_stretched(part, n, patterns) for part in state)
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def _columns(x: Tensor, n: int) -> Tensor:
    """(B, H, S, D) -> (B, H, n, D), all like the last."""
    return x[:, :, -1:].expand(-1, -1, n, -1)


def random_tokens(gpt: GPT, n: int) -> Tensor:
    """(1, n) ids."""
    return torch.randint(gpt.config.n_vocab, (1, n), device=gpt.embed.weight.device)


def time_steps(gpt: GPT, decoders: dict[tuple[str, int], Decode], steps: int) -> dict[tuple[str, int], float]:
    """Each decoder's median seconds for a token, the decoders in turns of random order."""
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in decoders}
    for number in range(WARM_UP + steps):
        for key in random.sample(list(decoders), len(decoders)):  # nobody always follows the same one
            token_ids = random_tokens(gpt, 1)
            started = time.perf_counter()
            decoders[key](token_ids)[0, 0, 0].item()  # waits for the device
            if number >= WARM_UP:
                seconds[key].append(time.perf_counter() - started)
    return {key: statistics.median(found) for key, found in seconds.items()}


def state_bytes(state: Any) -> int:
    """Bytes of all tensors of a state; neither counts of tokens nor a cache's room for more."""
    if isinstance(state, Tensor):
        return state.nbytes
    return sum(map(state_bytes, state)) if isinstance(state, tuple) else 0


def rates(figure: Row) -> list[str]:
    """A model's speed at each position, for people."""
    return [
        f"{row['tokens_per_second']:,.1f}" + (f" ({row['over_hf']:.2f} x)" if "over_hf" in row else "")
        for row in figure["speed"]
    ]


def table(title: str, columns: Iterable[str], rows: Mapping[str, Iterable[str]]) -> Table:
    """A model a row."""
    shown = Table("model", title=title)
    for column in columns:
        shown.add_column(column, justify="right")
    for name, cells in rows.items():
        shown.add_row(name, *cells)
    return shown


if __name__ == "__main__":
    sys.exit(main())
