"""The check of compiled FlexAttention, which runs before it is used on a GPU: see model/ops/checks.py."""

from functools import partial

import torch
from torch import Tensor

from model.ops.checks import Tensors, compare
from model.ops.sparse_attention import attend
from model.ops.sparse_attention.naive import naive_sparse_attention
from model.ops.sparse_attention.patterns import CAUSAL, Pattern, longformer, strided, window

PATTERNS = {
    "window": window(40),
    "dilated window": window(40, dilation=1),
    "strided": strided(48),
    "longformer": longformer(40, 5),
}
IN_DOCUMENTS = {"all keys of a document": CAUSAL, "dilated window in documents": window(40, dilation=1)}


def check(device: str, dtype: str, head_dim: int, T: int = 300) -> None:
    """Compare FlexAttention with the definition, for each kind of pattern, and with documents.

    Args:
        T: tokens; 300 are two blocks and a part of a third.

    Raises:
        Wrong: a result or a gradient is wrong, or a second run has other bits.
    """
    generator = torch.Generator().manual_seed(0)
    q_k_v = torch.randn(3, 2, 2, T, head_dim, generator=generator).to(device, getattr(torch, dtype))
    leaves = dict(zip(("q", "k", "v"), q_k_v, strict=True))
    starts = torch.zeros(2, T, dtype=torch.bool)
    starts[0, [5, T // 2]] = starts[1, T - 1] = True
    cases = [(name, pattern, leaves) for name, pattern in (PATTERNS | IN_DOCUMENTS).items()]
    # For few tokens, inductor may take another kernel.
    short = {name: x[:, :, :100].clone() for name, x in leaves.items()}
    for name, pattern, own in [*cases, ("window, 100 tokens", PATTERNS["window"], short)]:
        documents = starts if name in IN_DOCUMENTS else None
        flex, definition = (partial(form, pattern=pattern, starts=documents) for form in (_flex, _definition))
        compare(name, flex, definition, own)


def _flex(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, starts: Tensor | None) -> Tensors:
    return {"y": attend._by_flex_attention(q, k, v, pattern, None if starts is None else starts.to(q.device))}


def _definition(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, starts: Tensor | None) -> Tensors:
    return {"y": naive_sparse_attention(q, k, v, [pattern], None if starts is None else starts.to(q.device))}
