"""Context parallel: several processes share each sequence (runtime.context_parallel).

Each process computes a stretch of the sequence. All that a layer must know of earlier tokens is its state, whose size
does not depend on their number: a process takes the state from the process before it, computes its stretch, and passes
the state after it on. It then computes its next layer while the next process computes this one. Gradients of states go
the opposite way in the backward pass. With n processes and L layers, this takes (L + n - 1) / L times as long as if no
process ever waited.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from model.gpt import GPT
from model.state import restored, tensors_of
from trainer.distributed import SequenceGroup


def share_sequences(gpt: GPT, group: SequenceGroup) -> None:
    """Let the modules of a model take their states from the process before this one, and pass them to the next.

    Only where gradients are computed: elsewhere, as in evaluation, every process computes whole sequences.
    """
    gpt.call = partial(_shared, group)


def _shared(group: SequenceGroup, module: Any, x: Tensor, state: Any, *others: Any, **options: bool) -> tuple[Any, ...]:
    """module(x, state, ...) -> (x, ..., state), with the state of the process before this one."""
    if not torch.is_grad_enabled():
        return module(x, state, *others, **options)
    empty = module.initial_state(len(x), x.device)
    x, state = _take(x, group, empty)
    x, *between, after = module(x, state, *others, **dict.fromkeys(options, True))  # return_state
    return _pass_on(x, group, after, empty), *between, after


def _take(x: Tensor, group: SequenceGroup, empty: Any) -> tuple[Tensor, Any]:
    """Receive the state of the tokens before x: (x, state). Before the first token, it is `empty`."""
    if group.place == 0:
        return x, empty
    like = {name: value for name, (value, _) in tensors_of(empty)}
    x, *received = _Take.apply(x, group, *like.values())
    return x, restored(empty, dict(zip(like, received, strict=True)))


def _pass_on(x: Tensor, group: SequenceGroup, state: Any, empty: Any) -> Tensor:
    """Send the state after x to the next process; returns x, through which the state's gradients come back."""
    if group.place == group.size - 1:
        return x
    pairs = zip(tensors_of(state), tensors_of(empty), strict=True)
    return cast(Tensor, _PassOn.apply(x, group, *(own.value.to(like.value.dtype) for (_, own), (_, like) in pairs)))


class _Take(torch.autograd.Function):
    """Receives states, and sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup, *like: Tensor) -> tuple[Tensor, ...]:
        states = [group.receive(state, -1) for state in like]
        ctx.group, ctx.floats = group, [state.is_floating_point() for state in states]
        ctx.mark_non_differentiable(*(state for state in states if not state.is_floating_point()))
        return x.view_as(x), *states

    @staticmethod
    def backward(ctx: Any, g: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        for gradient, is_float in zip(gradients, ctx.floats, strict=True):
            if is_float:
                ctx.group.send(gradient, -1)
        return g, None, *(None for _ in gradients)


class _PassOn(torch.autograd.Function):
    """Sends states, and receives their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup, *states: Tensor) -> Tensor:
        ctx.group, ctx.like = group, [torch.empty_like(state, device="meta") for state in states]
        for state in states:
            group.send(state, +1)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        received = (ctx.group.receive(like, +1) if like.is_floating_point() else None for like in ctx.like)
        return g, None, *received
