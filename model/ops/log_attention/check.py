"""The check of the Triton kernels of log attention, which `auto` runs before it uses them: see model/ops/checks.py."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from model.ops.checks import Tensors, compare
from model.ops.log_attention import BACKENDS, LogAttentionState
from model.ops.log_attention.state import empty_state

DEVIATIONS = (
    1,
    80,
)  # at 80, plain exponentials under- and overflow, and the exact form computes most tiles
_FORGOTTEN = 0.05  # times the deviation: a head's gates of a chunk add up to about -2.6, or -200


def check(
    device: str, dtypes: Sequence[str], sizes: Sequence[int], lengths: Sequence[int] = (130, 144)
) -> None:
    """Compare the kernels with the definition, with and without a state, near 0 and far from it, and in segments.

    Args:
        dtypes: types of q, k, log_v and, with gates, log_f.
        sizes: their last dimensions.
        lengths: numbers of tokens; two chunks and a part of a third. Triton compiles other code for multiples of 16.

    Raises:
        Wrong: a result or a gradient is wrong, or a second run has other bits.
    """
    for T, deviation, has_state in itertools.product(lengths, DEVIATIONS, (False, True)):
        for segments in (1, 2) if (T, deviation) == (lengths[0], 1) else (1,):
            case = f"{'a state' if has_state else 'no state'}, deviation {deviation}, {T} tokens"
            case += f", {segments} segments" * (segments > 1)
            kernels, definition = (
                partial(attend, "triton", segments=segments),
                partial(attend, "naive"),
            )
            compare(
                case,
                kernels,
                definition,
                inputs(torch.device(device), dtypes, sizes, T, has_state, deviation),
            )


def inputs(
    device: torch.device,
    dtypes: Sequence[str],
    sizes: Sequence[int],
    T: int,
    has_state: bool,
    deviation: int,
) -> Tensors:
    """Random q, k, log_v and perhaps log_f, (2, 2, T, sizes) each, and the state.

    As in a model, all but log_f are slices of a projection, in which the heads of a token follow each other.
    """
    generator = torch.Generator().manual_seed(0)
    projection = deviation * torch.randn(2, T, 2, sum(sizes), generator=generator)
    leaves = {}
    for i, (name, dtype) in enumerate(zip(("q", "k", "log_v", "log_f"), dtypes, strict=False)):
        x = (
            projection.to(device, getattr(torch, dtype))
            .split(list(sizes), dim=-1)[i]
            .transpose(1, 2)
        )
        leaves[name] = x if name != "log_f" else -_FORGOTTEN * x.abs()
    if has_state:
        empty = empty_state(leaves["q"], leaves["log_v"])
        state = (deviation * torch.randn(x.shape, generator=generator).to(x) for x in empty)
        leaves |= zip(LogAttentionState._fields, state, strict=True)
    return leaves


def attend(
    backend: str, /, log_s: Tensor | None = None, log_z: Tensor | None = None, **inputs: Any
) -> Tensors:
    """Log attention as a function of `inputs`; the state after the tokens is wanted if one is given."""
    state = None if log_s is None or log_z is None else LogAttentionState(log_s, log_z)
    outputs = BACKENDS[backend](**inputs, causal=True, state=state, return_state=state is not None)
    if state is None:
        return {"log_y": cast(Tensor, outputs)}
    log_y, after = cast(tuple[Tensor, LogAttentionState], outputs)
    return {"log_y": log_y, **after._asdict()}
