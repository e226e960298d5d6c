"""Decoding: tokens per second at several positions of a text, and bytes of the state that it
takes."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from model.gpt import GPT
from model.graphs import DecodingStep
from model.state import lengthened, state_bytes
from runtime.device import open_runtime
from tools.bench.harness import Row, in_turn, profiled, timed
from tools.bench.train import config_of

WARM_UP = 3  # steps that are not timed; a stretched cache is copied in the first
PROFILED = 4  # steps of a profile
READ = 8  # tokens before a state is stretched

Decode = Callable[[Tensor], Tensor]
"""One more token (1, 1) -> its logits (1, 1, n)."""


@torch.inference_mode()
def measure(options: Any) -> dict[str, list[Row]]:
    """Measure every model at each position."""
    positions = sorted(set(options.positions))
    room = positions[-1] + WARM_UP + options.steps + PROFILED
    overrides = [*options.set, f"runtime.device={options.device}", "runtime.dtype=float32"]
    decoders: dict[tuple[str, int], Decode] = {}
    sizes: dict[tuple[str, int], int] = {}
    torch.manual_seed(0)
    for name in options.models:
        config = config_of([f"model={name}", *overrides], room, 1)
        gpt = GPT(config.model).to(open_runtime(config.runtime).device)
        _, state = gpt(
            torch.zeros(1, READ, dtype=torch.int64, device=options.device), return_state=True
        )
        for at in positions:
            long = lengthened(gpt, state, at)
            decoders[name, at], sizes[name, at] = (
                ours(DecodingStep(gpt, 1), long),
                state_bytes(long),
            )
    token = torch.zeros(1, 1, dtype=torch.int64, device=options.device)

    def step(decode: Decode) -> None:
        decode(token)[0, 0, 0].item()  # waits for the device

    turns = {key: timed(partial(step, decode)) for key, decode in decoders.items()}
    rate = {
        key: 1 / statistics.median(found)
        for key, found in in_turn(turns, options.steps, WARM_UP).items()
    }
    first = next(iter(rate))[0]
    rows: list[Row] = [
        {"model": name, "position": at, "tokens_per_second": own, "x": own / rate[first, at]}
        | {"bytes_of_state": sizes[name, at]}
        for (name, at), own in rate.items()
    ]
    last = {
        name: partial(step, decode)
        for (name, at), decode in decoders.items()
        if at == positions[-1]
    }
    profiles = {
        f"a token of {name}": profiled(run, PROFILED - 1)
        for name, run in last.items()
        if options.profile
    }
    return {"decode": rows, **profiles}


def ours(step: DecodingStep, state: Any) -> Decode:
    """Decode from a state on."""

    def decode(token_ids: Tensor) -> Tensor:
        nonlocal state
        logits, state = step(token_ids, state, return_state=True)
        return logits

    return decode
