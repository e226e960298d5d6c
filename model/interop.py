"""Loads published weights, and translates the names of parameters."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from common.settings import UserError, decode
from model.config import GPTConfig
from model.gpt import GPT

# What our names of parameters have -> what the published code has in its place, one after another.
_PUBLISHED = {
    ".attention.qkv.": ".feedforward1.1.",
    ".norm.": ".feedforward1.0.",
    ".gate.": ".feedforward2.0.",
    ".proj.": ".feedforward2.2.",
    "blocks.": "layers.",
    "norm.": "lnorm.",
    "position.": "embed_pos.",
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
    # Read the architecture and all tensors of the model.
    try:
        with safe_open(path, framework="pt") as file:
            sizes = json.loads((file.metadata() or {}).get("config", "{}"))
            keys = [key for key in file.keys() if "weights/" in key]  # noqa: SIM118
            tensors = {key.removeprefix("weights/"): file.get_tensor(key) for key in keys}
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"cannot read published weights from {path}: {error}") from None
    missing = [size for size in _SIZES if size not in sizes]
    if missing:
        raise UserError(
            f"{path} does not describe an architecture: the config in its metadata lacks "
            f"{', '.join(missing)}"
        )
    # Lay out the model, and let it take these tensors as its weights.
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
    for before, after in _PUBLISHED.items():
        ours = ours.replace(before, after)
    return ours
