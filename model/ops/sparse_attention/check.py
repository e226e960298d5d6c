"""The check of compiled FlexAttention, which runs before it is used on a GPU: see model/ops/checks.py."""

import torch
from torch import Tensor

from model.ops.checks import Tensors, compare
from model.ops.sparse_attention import attend
from model.ops.sparse_attention.naive import naive_sparse_attention
from model.ops.sparse_attention.patterns import Pattern, longformer, strided, window

PATTERNS = {
    "window": window(40),
    "dilated window": window(40, dilation=1),
    "strided": strided(48),
    "longformer": longformer(40, 5),
}


def check(device: str, dtype: str, head_dim: int, T: int = 300) -> None:
    """Compare FlexAttention with the definition, for each kind of pattern.

    Args:
        T: tokens; 300 are two blocks and a part of a third.

    Raises:
        Wrong: a result or a gradient is wrong, or a second run has other bits.
    """
    generator = torch.Generator().manual_seed(0)
    q_k_v = torch.randn(3, 1, 2, T, head_dim, generator=generator).to(device, getattr(torch, dtype))
    leaves = dict(zip(("q", "k", "v"), q_k_v, strict=True))
    for name, pattern in PATTERNS.items():

        def flex(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern = pattern) -> Tensors:
            return {"y": attend._by_flex_attention(q, k, v, pattern)}

        def definition(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern = pattern) -> Tensors:
            return {"y": naive_sparse_attention(q, k, v, [pattern])}

        compare(name, flex, definition, leaves)
