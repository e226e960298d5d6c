"""Initial weights and learning rates of a model, from those of a model of another size.

The rule is CompleteP (Dey et al. 2025, table 1): muP for the width (Yang et al. 2022), and residual
branches that shrink in proportion to the depth. Muon's updates keep the spectral norm that muP asks
for (Yang et al. 2023, Zheng et al. 2026). For a model w times as wide and d times as deep, the
factors are:

| parameters | initial values | AdamW's learning rate | Muon's |
|---|---|---|---|
| linear layers | w^-1/2 | 1 / w | w^-1/2 |
| linear layers that write to the residual stream | w^-1/2 / d | 1 / (w d) | w^-1/2 / d |
| norm before the output layer, or without weights that layer | 1 / w | 1 / w | |
| others: embeddings, output layer, vectors, maps of a fixed number of features | 1 | 1 | |

Nothing else changes: lr x weight_decay, the share that decays in a step, is the same for all
parameters and sizes, and eps is divided by w d, as gradients are. Heads keep their features, so
there are w times as many.

CompleteP multiplies the results of branches by 1 / d, and logits by 1 / w. Here, the weights before
them have these factors. The function is the same, and so is its training, since neither optimizer
sees the scale of a gradient; so evaluation, decoding and export need no change. Only the gradient
norm differs: the last norm contributes more to it.
"""

from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from common.settings import Settings, UserError
from model.blocks import MLPBlock
from model.gpt import GPT


class TransferConfig(Settings):
    """The size of the model that optim.max_lr was tuned for.

    Learning rates and initial weights of another size are derived from it (CompleteP, Dey et al.
    2025); null: they are as given.
    """

    n_embd: int = Field(ge=1)
    """Its model.n_embd."""
    n_layer: int = Field(ge=1)
    """Its model.n_layer."""


class Scale(NamedTuple):
    """Factors for a parameter."""

    init: float = 1.0
    """Factor of the initial values."""
    adamw: float = 1.0
    """Factor of AdamW's learning rate."""
    muon: float = 1.0
    """Factor of Muon's learning rate."""


def ratios(gpt: GPT, tuned: TransferConfig | None) -> tuple[float, float]:
    """1 / w and 1 / d."""
    base = tuned or gpt.config
    return base.n_embd / gpt.config.n_embd, base.n_layer / gpt.config.n_layer


def scale_factors(gpt: GPT, tuned: TransferConfig | None) -> dict[Tensor, Scale]:
    """The factors for each parameter."""
    width, depth = ratios(gpt, tuned)
    # These are drawn in proportion to n_embd^-0.5, and should not depend on n_embd.
    as_tuned = Scale(init=width**-0.5)
    factors: dict[Tensor, Scale] = dict.fromkeys(gpt.parameters(), Scale())
    # Linear layers.
    for module in gpt.modules():
        if isinstance(module, nn.Linear):
            factors[module.weight] = Scale(adamw=width, muon=width**0.5)
            if module.bias is not None:
                factors[module.bias] = as_tuned
    # Those that write to the residual stream shrink with the depth, too.
    for block in gpt.blocks:
        init = depth
        if isinstance(block, MLPBlock):
            init /= depth**0.5  # it draws these weights in proportion to n_layer^-0.5
        for name, layer in block.named_children():
            if name in ("proj", "down") and isinstance(layer, nn.Linear):
                factors[layer.weight] = Scale(init, width * depth, width**0.5 * depth)
                if layer.bias is not None:
                    factors[layer.bias] = Scale(adamw=depth)
    # Embeddings, the output layer and the norm before it.
    factors |= {gpt.embed.weight: as_tuned, gpt.output_weight: as_tuned}
    if gpt.config.norm == "rms":
        if gpt.config.tied and width != 1:
            raise UserError(
                "optim.transfer scales the last norm or the output layer, and model.norm=rms with "
                "model.tied=true has neither for it: use model.tied=false, or optim.transfer=null"
            )
        factors[gpt.output_weight] = Scale(init=width**0.5, adamw=width)
    return factors | dict.fromkeys(gpt.norm.parameters(), Scale(init=width, adamw=width))


@torch.no_grad()
def scale_weights(gpt: GPT, tuned: TransferConfig | None) -> None:
    """Multiply the weights of a new model by their factors."""
    for p, scale in scale_factors(gpt, tuned).items():
        p.mul_(scale.init)
