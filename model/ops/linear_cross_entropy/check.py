"""The check of the loss's kernel, which `auto` runs before it uses it: see model/ops/checks.py."""

import torch
from torch import Tensor

from model.ops.checks import Tensors, compare
from model.ops.linear_cross_entropy import summed_loss, token_losses

SHAPES = ((1, 1, None), (3, 257, 2.0), (4, 4196, None), (2, 12288, 30.0))
"""Tokens, vocabulary, cap: vocabularies of less than a block, of one and a part, and of three."""


def check(device: str, dtype: str) -> None:
    """Compare the loss by the kernel with that of torch's cross-entropy.

    Raises:
        Wrong: the loss or a gradient is wrong, or a second run has other bits.
    """
    for N, n_vocab, cap in SHAPES:
        generator = torch.Generator().manual_seed(n_vocab)
        x, weight = (torch.randn(n, 16, generator=generator).to(device, getattr(torch, dtype)) for n in (N, n_vocab))
        targets = torch.randint(n_vocab, (N,), generator=generator)
        targets[1:2] = -1

        def kernel(x: Tensor, weight: Tensor, targets: Tensor = targets, cap: float | None = cap) -> Tensors:
            return {"the loss": summed_loss(x, weight, targets.to(x.device), cap, backend="triton")}

        def definition(x: Tensor, weight: Tensor, targets: Tensor = targets, cap: float | None = cap) -> Tensors:
            return {"the loss": token_losses(x, weight, targets.to(x.device), cap).sum()}

        compare(f"{N} x {n_vocab} logits, {cap=}", kernel, definition, {"x": x, "weight": weight})
