"""Pictures of who attends to whom: weights and masks of every attention mechanism, or of a trained model's layers."""

import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from common.console import count, say
from common.figures import png
from common.files import make_directory, refuse_foreign, write_atomic
from common.settings import JsonDict, UserError, decode
from model.attention.base import Attention
from model.attention.log_space import LogSpaceAttention
from model.attention.longformer import LongformerAttention
from model.gpt import GPT, GPTConfig
from model.position import Positions, Rotation
from trainer.checkpoint import load_model

LONGEST = 64
"""Tokens that fit on a panel."""

Panels = dict[str, tuple[Tensor, Tensor]]
"""Weights and mask, (T, T), by title."""


def draw(
    checkpoint: Path | None, head: int, text: str, out: Path, panels: dict[str, JsonDict]
) -> None:
    """Write the picture of a checkpoint's layers, or of mechanisms: `panels` has their settings by title."""
    make_directory(out.parent, "out")
    refuse_foreign(b"Matplotlib", out)
    if not text.strip():
        raise UserError("text is empty: give a sentence")
    labels, found = (
        of_checkpoint(checkpoint, text, head) if checkpoint else of_mechanisms(text, panels)
    )
    write_atomic(out, picture(labels, found))
    say(f"{count(len(found), 'panel')} written to {out}")


def of_mechanisms(text: str, settings: dict[str, JsonDict]) -> tuple[list[str], Panels]:
    """Return the words, and a panel for every mechanism; a repeated word is the same token."""
    words = text.split()
    ids = torch.tensor([[words.index(word) for word in words]])  # (1, T)
    panels = {}
    for title, own in settings.items():
        torch.manual_seed(1)
        attention, head = {key: own[key] for key in own if key != "head"}, own.get("head", 1) - 1
        sizes = {"n_vocab": len(words), "n_layer": 1, "n_head": 2, "n_embd": 64}
        parts = {"attention": attention, "block": {"name": "glu"}, "position": {"name": "none"}}
        (weights, mask), *_ = weights_and_masks(GPT(decode(GPTConfig, sizes | parts)), ids)
        panels[title] = weights[head], mask[head % len(mask)]
    return words, panels


def of_checkpoint(checkpoint: Path, text: str, head: int) -> tuple[list[str], Panels]:
    """Return the tokens, and a panel for one head of every layer of a trained model; the first head is 1."""
    gpt, tokenizer = load_model(checkpoint)
    if not 1 <= head <= gpt.config.n_head:
        raise UserError(f"head={head} does not exist in this model: give 1 to {gpt.config.n_head}")
    encoded, panels = tokenizer.encode(text), {}
    ids = torch.tensor([encoded])
    for n, (layer, found) in enumerate(
        zip(gpt.config.layers, weights_and_masks(gpt, ids), strict=True), start=1
    ):
        weights, mask = found
        panels[f"layer {n}, {layer.name}, head {head}"] = (
            weights[head - 1],
            mask[(head - 1) % len(mask)],
        )
    return [_label(tokenizer.decode_bytes([token])) for token in encoded], panels


def _label(token: bytes) -> str:
    """Make spaces and line ends visible."""
    return (
        token.decode(errors="replace")
        .replace(" ", "\N{OPEN BOX}")
        .replace("\n", "\\n")
        .replace("\t", "\\t")
    )


@torch.no_grad()
def weights_and_masks(gpt: GPT, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Run ids (1, T) and return the weights (H, T, T) and mask (1 or H, T, T) of every layer's attention.

    Raises:
        UserError: there are too many tokens, or none.
    """
    if not 1 <= ids.numel() <= LONGEST:
        raise UserError(f"text has {ids.numel()} tokens: give 1 to {LONGEST}")
    found: list[tuple[Tensor, Tensor]] = []

    def look(layer: Any, inputs: tuple[Tensor, Positions]) -> None:
        x, positions, *_ = inputs
        found.append((weights_of(layer, x, positions.rotation), layer.mask(x.shape[1])))

    hooks = [m.register_forward_pre_hook(look) for m in gpt.modules() if isinstance(m, Attention)]
    gpt(ids)
    for hook in hooks:
        hook.remove()
    return found


def weights_of(layer: Attention, x: Tensor, rotation: Rotation | None) -> Tensor:
    """Return the weights (H, T, T) for x (1, T, n_embd): the definition's result if the values are unit vectors."""
    q, k, _ = layer.project(layer.features(x)[0], rotation)
    log_f, _ = layer.forgetting(x)
    unit = torch.eye(x.shape[1], dtype=x.dtype).expand(1, k.shape[1], -1, -1)
    if type(layer) is LogSpaceAttention:  # its values are logarithms, and so is its result
        return layer.naive_attend(q, k, unit.log(), log_f)[0].exp()
    weights = layer.naive_attend(q, k, unit, log_f)[0]
    if isinstance(layer, LongformerAttention):
        q, k, _ = layer.project(layer.qkv_global(x), rotation)
        weights[:, : layer.n_global] = layer.naive_attend(q, k, unit, None)[0, :, : layer.n_global]
    return weights


def picture(labels: list[str], panels: Panels) -> bytes:
    """Draw the panels, four in a row, as a PNG."""
    columns = min(4, len(panels))
    rows = math.ceil(len(panels) / columns)
    side = max(2.6, 0.17 * len(labels))
    figure = Figure(figsize=(columns * side + 0.8, rows * (side + 0.3) + 0.8))
    ticks, angle = range(len(labels)), 90 if max(map(len, labels)) > 2 else 0
    for n, (title, (weights, mask)) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, n + 1)
        relative = (weights / weights.amax(-1, keepdim=True).clamp_min(1e-30)).masked_fill(
            ~mask, math.nan
        )
        axes.set_facecolor("0.88")
        image = axes.imshow(relative, cmap="Blues", vmin=0, vmax=1)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(
            ticks, labels if n + columns >= len(panels) else [], rotation=angle, fontsize=7
        )
        axes.set_yticks(ticks, labels if n % columns == 0 else [], fontsize=7)
        axes.grid(visible=False)
    bar = figure.colorbar(image, ax=figure.axes, shrink=0.4, pad=0.01)
    bar.set_label("weight, the row's largest = 1; grey: may not attend", fontsize=8)
    return png(figure)
