"""The check of compiled FlexAttention, which runs before it is used on a GPU: see model/ops/checks.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from model.ops.checks import Tensors, compare
from model.ops.sparse_attention import attend
from model.ops.sparse_attention.naive import naive_sparse_attention
from model.ops.sparse_attention.patterns import CAUSAL, longformer, strided, window

PATTERNS = {
    "window": window(40),
    "dilated window": window(40, dilation=1),
    "strided": strided(48),
    "longformer": longformer(40, 5),
}
IN_DOCUMENTS = {
    "all keys of a document": CAUSAL,
    "dilated window in documents": window(40, dilation=1),
}
FORGETTING = {"gates": CAUSAL, "gates in documents": CAUSAL}


def check(device: str, dtype: str, head_dim: int, T: int = 300, forgets: bool = False) -> None:
    """Compare FlexAttention with the definition, for each kind of pattern, and with documents.

    Args:
        T: tokens; 300 are two blocks and a part of a third.
        forgets: attention to all tokens with gates, one head of short and one of long spans, in place of the patterns.

    Raises:
        Wrong: a result or a gradient is wrong, or a second run has other bits.
    """
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, T, 3, 2, head_dim, generator=generator).to(
        device, getattr(torch, dtype)
    )
    leaves = dict(
        zip(("q", "k", "v"), features.permute(2, 0, 3, 1, 4), strict=True)
    )  # as views of a projection
    if forgets:
        gates = torch.randn(2, T, 2, generator=generator) + torch.tensor([0.0, 5.0])
        leaves["log_f"] = logsigmoid(gates).to(device).mT.unsqueeze(-1)
    starts = torch.zeros(2, T, dtype=torch.bool)
    starts[0, [5, T // 2]] = starts[1, T - 1] = True
    cases = [
        (name, pattern, leaves)
        for name, pattern in (FORGETTING if forgets else PATTERNS | IN_DOCUMENTS).items()
    ]
    if not forgets:  # for few tokens, inductor may take another kernel
        cases.append(
            (
                "window, 100 tokens",
                PATTERNS["window"],
                {name: x[:, :, :100] for name, x in leaves.items()},
            )
        )
    for name, pattern, own in cases:
        documents = starts if "document" in name else None
        flex = partial(_attend, attend._by_flex_attention, documents, pattern=pattern)
        compare(
            name, flex, partial(_attend, naive_sparse_attention, documents, patterns=[pattern]), own
        )


def _attend(form: Callable[..., Tensor], starts: Tensor | None, **inputs: Any) -> Tensors:
    return {"y": form(starts=None if starts is None else starts.to(inputs["q"].device), **inputs)}
