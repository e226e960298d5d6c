"""Time the decoding of one token at several positions of a text, and measure the state it needs.

    python scripts/bench_decode.py                    # log_gpt_1m after 1,000 and after 1,000,000 tokens
    python scripts/bench_decode.py --models log_gpt_1m --set model/attention=softmax --positions 1000 16000

A model of random weights reads random tokens up to each position. Then the positions take turns, step by step, each
always from its own state: whatever else the machine does hits all alike.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from cli import compose, to_dict
from common.console import Track, console, say
from common.files import make_directory, write_json
from common.settings import decode
from model.generate import prefill
from model.gpt import GPT, GPTConfig, GPTState
from trainer.runtime import DeviceConfig, open_runtime

WARM_UP = 10  # steps at each position that are not timed
PIECE = 2**14  # tokens read between two lines of progress
Row = dict[str, Any]


@torch.inference_mode()
def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, write bench.json."""
    options = parse(argv)
    out = make_directory(options.out, "--out")
    positions = sorted(set(options.positions))
    figures: dict[str, list[Row]] = {}
    for name in options.models:
        gpt = build(name, options.set, positions[-1] + 1)
        states = read(gpt, positions)
        seconds = time_steps(gpt, states, options.steps)
        figures[name] = [
            {"position": at, "seconds_per_token": seconds[at], "state_bytes": state_bytes(states[at])}
            for at in positions
        ]
    console.print(table(figures, options.steps))
    write_json(out / "bench.json", {"options": {k: str(v) for k, v in vars(options).items()}, "models": figures})
    say(f"written to {out / 'bench.json'}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["log_gpt_1m"], help="files of configs/model")
    parser.add_argument("--set", nargs="*", default=[], help="options for all of them: model.n_layer=2")
    parser.add_argument("--positions", nargs="+", type=int, default=[1_000, 1_000_000], help="tokens read before")
    parser.add_argument("--steps", type=int, default=2000, help="timed steps at each position")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_decode"))
    return parser.parse_args(argv)


def build(name: str, overrides: list[str], max_len: int) -> GPT:
    """A model of configs/model with random weights, in float32, for texts of `max_len` tokens at least."""
    composed = to_dict(compose("train", [f"model={name}", "dataset_dir=none", *overrides]))
    if composed["model"]["position"]["name"] == "learned":
        composed["model"]["position"]["max_len"] = max(max_len, composed["model"]["position"]["max_len"])
    runtime = open_runtime(DeviceConfig(device=composed["runtime"]["device"], dtype="float32"))
    torch.manual_seed(0)
    return GPT(decode(GPTConfig, composed["model"])).to(runtime.device)


def read(gpt: GPT, positions: list[int]) -> dict[int, GPTState]:
    """The state after each of these many random tokens."""
    states: dict[int, GPTState] = {}
    state, done = None, 0
    with Track("tokens read", positions[-1]) as track:
        for position in positions:
            for piece in random_tokens(gpt, position - done).split(PIECE, dim=1):
                _, state = prefill(gpt, piece, state)
                track.advance(piece.shape[1])
            assert state is not None
            states[position], done = state, position
    return states


def random_tokens(gpt: GPT, n: int) -> Tensor:
    """(1, n) ids."""
    return torch.randint(gpt.config.n_vocab, (1, n), device=gpt.embed.weight.device)


def time_steps(gpt: GPT, states: dict[int, GPTState], steps: int) -> dict[int, float]:
    """Median seconds of a step of one token from each state, the states in turns of random order."""
    seconds: dict[int, list[float]] = {position: [] for position in states}
    for number in range(WARM_UP + steps):
        for position in random.sample(list(states), len(states)):  # nobody always follows the same one
            token_ids = random_tokens(gpt, 1)
            started = time.perf_counter()
            logits, _ = gpt(token_ids, states[position], return_state=True)
            logits[0, 0, 0].item()  # waits for the device
            if number >= WARM_UP:
                seconds[position].append(time.perf_counter() - started)
    return {position: statistics.median(found) for position, found in seconds.items()}


def state_bytes(state: Any) -> int:
    """Bytes of all tensors of a state; what is not a tensor, such as a count of tokens, is not counted."""
    if isinstance(state, Tensor):
        return state.nbytes
    return sum(map(state_bytes, state)) if isinstance(state, tuple) else 0


def table(figures: dict[str, list[Row]], steps: int) -> Table:
    """Each model's positions beside its first."""
    shown = Table(title=f"decoding one token, float32, medians of {steps:,} steps; x: ratio to the first position")
    for column in ("model", "position", "ms per token", "x", "bytes of state"):
        shown.add_column(column, justify="left" if column == "model" else "right")
    for name, rows in figures.items():
        for row in rows:
            ratio = row["seconds_per_token"] / rows[0]["seconds_per_token"]
            figure = f"{1e3 * row['seconds_per_token']:.3f}"
            shown.add_row(name, f"{row['position']:,}", figure, f"{ratio:.3f}", f"{row['state_bytes']:,}")
        shown.add_section()
    return shown


if __name__ == "__main__":
    main()
