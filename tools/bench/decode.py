"""Decoding: tokens per second at several positions of a text, and bytes of the state that it takes."""

import importlib
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cli import CONFIGS
from common.console import say
from common.settings import UserError
from model.gpt import GPT, GPTConfig
from model.graphs import DecodingStep
from model.state import repeated_columns, state_bytes, stretched
from tools.bench.harness import Row, benchmark, in_turn, timed
from tools.bench.train import config_of
from trainer.config import TrainConfig
from trainer.runtime import open_runtime

WARM_UP = 3  # steps that are not timed; a stretched cache is copied in the first
READ = 8  # tokens before a state is stretched
BYTES_AT = (1_000, 32_000, 1_000_000)  # positions at which states are sized

Decode = Callable[[Tensor], Tensor]
"""One more token (1, 1) -> its logits (1, 1, n)."""


@benchmark("decoding in float32, medians of {steps} steps; x: ratio to Hugging Face's GPT-2")
def bench(options: Any) -> Row:
    """Measure each model.

    Raises:
        UserError: Hugging Face's GPT-2 is asked for, but is not installed, or cannot have the shape.
    """
    attentions = options.attention
    if attentions == ["all"]:
        attentions = sorted(path.stem for path in (CONFIGS / "model/attention").glob("*.yaml"))
    positions = sorted({*options.positions})
    room = positions[-1] + WARM_UP + options.steps

    def configured(model: str, *attention: str) -> TrainConfig:
        return config_of([f"model={model}", *attention, *options.set, "runtime.dtype=float32"], room, 1)

    hf = options.hf and configured(options.hf).model
    models = {
        ", ".join(filter(None, (model, name))): configured(model, *([f"model/attention={name}"] if name else []))
        for model in options.models
        for name in attentions or [None]
    }
    rows = []
    for label, config in models.items():
        for row in measure(config, hf, positions, options.steps):
            rows.append({"model": label, **row})
        say(f"{label} is measured")
    return {"rows": rows}


@torch.inference_mode()
def measure(config: TrainConfig, hf: GPTConfig | None, positions: list[int], steps: int) -> list[Row]:
    """One model's speed at each position, beside that of Hugging Face's in the shape of `hf`, and its bytes."""
    device = open_runtime(config.runtime).device
    torch.manual_seed(0)
    gpt = GPT(config.model).to(device)
    tokens = torch.randint(config.model.n_vocab, (1, READ), device=device)
    _, state = gpt(tokens, return_state=True)
    decoders: dict[Any, Decode] = {
        ("ours", at): Ours(DecodingStep(gpt, 1), stretched(gpt, state, at)) for at in positions
    }
    if hf:
        gpt2 = build_hf(hf, config.seq_len).to(device).eval()
        decoders |= {("hf", at): hugging_face(gpt2, at) for at in positions}

    def step(decoder: Decode) -> None:
        decoder(tokens[:, :1])[0, 0, 0].item()  # waits for the device

    seconds = in_turn({key: timed(partial(step, it)) for key, it in decoders.items()}, steps, WARM_UP)
    rate = {key: 1 / statistics.median(found) for key, found in seconds.items()}
    rows = []
    for at in sorted({*positions, *BYTES_AT}):
        ours, theirs = rate.get(("ours", at)), rate.get(("hf", at))
        speed = {"tokens_per_second": ours, "x_hugging_face": ours / theirs if ours and theirs else None}
        rows.append({"position": at, **speed, "bytes_of_state": state_bytes(stretched(gpt, state, at))})
    return rows


def build_hf(config: GPTConfig, max_len: int) -> Any:
    """Hugging Face's GPT-2 with the shape of one of our models, with random weights, in float32."""
    transformers: Any = importlib.import_module("transformers")
    if config.n_head * config.head_features != config.n_embd:
        raise UserError(f"head_dim={config.head_dim} is not GPT-2's, whose heads share n_embd evenly: set it to null")
    shape = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd")}
    shape |= {"vocab_size": config.n_vocab_padded, "n_positions": max_len}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))


class Ours:
    """Decodes from a state on."""

    def __init__(self, step: GPT | DecodingStep, state: Any) -> None:
        self.step, self.state = step, state

    def __call__(self, token_ids: Tensor) -> Tensor:
        """One more token."""
        logits, self.state = self.step(token_ids, self.state, return_state=True)
        return logits


def hugging_face(gpt2: Any, position: int) -> Decode:
    """The same for Hugging Face's model, with a DynamicCache that is stretched to this position."""
    cache = gpt2(torch.zeros(1, READ, dtype=torch.long, device=gpt2.device), use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = repeated_columns(layer.keys, position), repeated_columns(layer.values, position)
    return lambda token_ids: gpt2(token_ids, past_key_values=cache, use_cache=True).logits  # it changes the cache
