"""Decoding: tokens per second after texts of several lengths, and bytes of the state."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from common.console import say
from common.settings import JsonDict
from model.gpt import GPT, GPTState
from model.graphs import DecodingStep
from model.state_trees import state_bytes
from runtime.device import choose_compute
from tools.bench.measuring import call_in_turn, time_call
from tools.bench.training import compose_steps

_CHUNK = 512  # tokens of a text that are read at once
_WARM_UP = 3  # steps that are not timed: the first copies a growing cache


@torch.inference_mode()
def measure_decoding(options: Any) -> list[JsonDict]:
    """Measure every model after each number of tokens."""
    positions = sorted(set(options.positions))
    room = positions[-1] + _WARM_UP + options.steps
    overrides = [*options.set, f"runtime.device={options.device}", "runtime.dtype=float32"]
    texts = {}
    sizes = {}
    torch.manual_seed(0)
    for name in options.models:
        config = compose_steps([f"model={name}", *overrides], room, 1)
        gpt = GPT(config.model).to(choose_compute(config.runtime).device)
        for position in positions:
            say(f"{name} reads {position:,} tokens ...")
            state = read_tokens(gpt, position)
            texts[name, position] = build_decoder(gpt, state)
            sizes[name, position] = state_bytes(state)
    runs = {key: partial(time_call, decode) for key, decode in texts.items()}
    timings = call_in_turn(runs, _WARM_UP + options.steps)
    medians = {key: statistics.median(seconds[_WARM_UP:]) for key, seconds in timings.items()}
    rows: list[JsonDict] = []
    for (name, position), seconds in medians.items():
        row = {
            "model": name,
            "position": position,
            "tokens_per_second": 1 / seconds,
            "x": medians[options.models[0], position] / seconds,
            "bytes_of_state": sizes[name, position],
        }
        rows.append(row)
    return rows


def read_tokens(gpt: GPT, n_tokens: int) -> GPTState | None:
    """Return the state after a text of so many tokens."""
    state = None
    ids = torch.zeros(1, n_tokens, dtype=torch.int64, device=gpt.device)
    for chunk in ids.split(_CHUNK, dim=1):
        _, state = gpt.features(chunk, state, return_state=True)
    return state


def build_decoder(gpt: GPT, state: Any) -> Callable[[], None]:
    """Return a function that decodes a token after a text, and then the next."""
    step = DecodingStep(gpt, 1)
    token = torch.zeros(1, 1, dtype=torch.int64, device=gpt.device)

    def decode() -> None:
        nonlocal state
        logits, state = step(token, state)
        logits[0, 0, 0].item()  # waits for the device

    return decode
