"""Detects steps that must not change the weights."""

import math
from collections.abc import Iterable

from torch import Tensor

from runtime.distributed import World


def why_bad(loss: float, grad_norm: float) -> str | None:
    """Return why a step must not change the weights, or None; the same in all processes."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return None
    return f"loss is {loss} and the gradient's norm {grad_norm}"


def first_not_finite(named: Iterable[tuple[str, Tensor]], world: World) -> list[str]:
    """Names of the first three parameters whose gradient is not finite. All processes call this."""
    names = []
    for name, p in named:
        if p.grad is not None and not world.unshard(p.grad).isfinite().all():
            names.append(name)
    return names[:3]
