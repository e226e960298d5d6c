"""The check of the log recurrence's kernels, which `auto` runs before it uses them: see model/ops/checks.py."""

from functools import partial
from typing import cast

import torch
from torch import Tensor

from model.ops.checks import Tensors, compare
from model.ops.log_recurrence import log_recurrence


def check(device: str, dtype: str) -> None:
    """Compare the kernels with the definition, for one token and for two blocks or more of tokens and features.

    Triton compiles other code for multiples of 16, and h is a half of a wider tensor, as in the model.

    Raises:
        Wrong: a result or a gradient is wrong, or a second run has other bits.
    """
    for B, T, D in ((2, 1, 1), (1, 65, 35), (2, 64, 48)):
        generator = torch.Generator().manual_seed(T)
        log_p, h = torch.rand(B, T, 2 * D, generator=generator).to(device, getattr(torch, dtype)).chunk(2, dim=-1)
        leaves = {"log_p": log_p.neg(), "h": h, "state": h[:, 0].float() - 1}
        leaves["log_p"][:, T // 2] = -torch.inf
        kernels, definition = (partial(recur, backend) for backend in ("triton", "naive"))
        compare(f"{T} tokens", kernels, definition, leaves)


def recur(backend: str, /, log_p: Tensor, h: Tensor, state: Tensor) -> Tensors:
    """The recurrence as a function of the leaves."""
    s, after = cast(tuple[Tensor, Tensor], log_recurrence(log_p, h, state=state, return_state=True, backend=backend))
    return {"s": s, "the state": after}
