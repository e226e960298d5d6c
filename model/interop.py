"""Loads published weights, and translates the names of parameters."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from common.settings import UserError, decode
from model.config import GPTConfig
from model.gpt import GPT

# Our names of modules -> names in the published code; {} is the layer's number.
_PUBLISHED_NAMES = {
    "embed.weight": "embed.weight",
    "position.dense": "embed_pos.dense",
    "norm": "lnorm",
    "blocks.{}.norm": "layers.{}.feedforward1.0",
    "blocks.{}.attention.qkv": "layers.{}.feedforward1.1",
    "blocks.{}.gate": "layers.{}.feedforward2.0",
    "blocks.{}.proj": "layers.{}.feedforward2.2",
}
_SIZES = ("vocab_sz", "d_emb", "n_layers", "n_heads", "d_key", "d_val")


def load_published(path: str | Path) -> GPT:
    """Build a GPT from weights of the published implementation, in the file's dtype.

    Args:
        path: a safetensors file with `weights/NAME` for each parameter, and the architecture as
            JSON in its metadata's `config`: vocab_sz, d_emb, n_layers, n_heads, d_key, d_val.

    Raises:
        UserError: the file cannot be read, or its tensors do not match its architecture.
    """
    try:
        with safe_open(path, framework="pt") as file:
            sizes = json.loads((file.metadata() or {}).get("config", "{}"))
            keys = [key for key in file.keys() if "weights/" in key]  # noqa: SIM118
            tensors = {key.removeprefix("weights/"): file.get_tensor(key) for key in keys}
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"cannot read published weights from {path}: {error}") from None
    if not isinstance(sizes, dict):
        sizes = {}
    missing = [size for size in _SIZES if size not in sizes]
    if missing:
        raise UserError(
            f"{path} does not describe an architecture: the config in its metadata lacks "
            f"{', '.join(missing)}"
        )
    with torch.device("meta"):
        gpt = GPT(published_config(**{size: sizes[size] for size in _SIZES}))
    try:
        weights = {ours: tensors[published_name(ours)] for ours in gpt.state_dict()}
        gpt.load_state_dict(weights, assign=True)
    except (KeyError, RuntimeError) as error:
        raise UserError(
            f"the weights in {path} do not match the architecture in its metadata: {error}"
        ) from None
    return gpt.requires_grad_()


def published_config(
    vocab_sz: int, d_emb: int, n_layers: int, n_heads: int, d_key: int, d_val: int
) -> GPTConfig:
    """Return our configuration of the published architecture, given its own names of the sizes."""
    config = {
        "n_vocab": vocab_sz,
        "n_layer": n_layers,
        "n_head": n_heads,
        "head_dim": d_key,
        "n_embd": d_emb,
        "attention": {"name": "log_space", "d_key": d_key, "d_val": d_val},
        "block": {"name": "glu"},
        "position": {"name": "log_recurrence"},
    }
    return decode(GPTConfig, config)


def published_name(ours: str) -> str:
    """Return the published name of one of our parameters: blocks.3.gate.bias ->
    layers.3.feedforward2.0.bias."""
    return name_elsewhere(ours, _PUBLISHED_NAMES)


def name_elsewhere(ours: str, names: Mapping[str, str]) -> str:
    """Translate the name of one of our parameters by a mapping of module names, where {} is the
    layer's number.

    Raises:
        KeyError: the mapping does not contain the parameter's module.
    """
    numbers = [word for word in ours.split(".") if word.isdigit()]
    layer = numbers[0] if numbers else ""
    for pattern, replacement in names.items():
        prefix = pattern.format(layer)
        if f"{ours}.".startswith(f"{prefix}."):
            return replacement.format(layer) + ours[len(prefix) :]
    raise KeyError(ours)
