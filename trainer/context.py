"""Context parallel: several processes share each sequence (runtime.context_parallel).

Each process computes a stretch of the sequence. All that a layer must know of earlier tokens is its state, whose size
does not depend on their number: a process takes the state from the process before it, computes its stretch, and passes
the state after it on. It then computes its next layer while the next process computes this one. Gradients of states go
the opposite way in the backward pass. With n processes and L layers, this takes (L + n - 1) / L times as long as if no
process ever waited.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from model.gpt import GPT
from model.position import Order, Rotation
from trainer.distributed import Line


def share_sequences(gpt: GPT, line: Line) -> None:
    """Let the layers of a model take their states from the process before this one, and pass them to the next.

    Only where gradients are computed: elsewhere, as in evaluation, every process computes whole sequences.
    """
    gpt.position.forward = _position(gpt.position.forward, line)
    for block in gpt.blocks:  # around recomputation, which must not receive anything again
        block.forward = _block(block.forward, line)


def _position(forward: Callable[..., Any], line: Line) -> Callable[..., Any]:
    def shared(x: Tensor, state: Any = None, starts: Tensor | None = None) -> tuple[Tensor, Rotation | None, Any]:
        if not torch.is_grad_enabled():
            return forward(x, state, starts)
        x, state = _take(x, line, lambda first: forward(first)[2])
        x, rotation, after = forward(x, state, starts)
        return _pass_on(x, line, after), rotation, after

    return shared


def _block(forward: Callable[..., Any], line: Line) -> Callable[..., Any]:
    def shared(x: Tensor, order: Order, state: Any = None, return_state: bool = False) -> tuple[Tensor, Any]:
        if not torch.is_grad_enabled():
            return forward(x, order, state, return_state)
        rotation = order.rotation and Rotation(*(angle[..., :1, :] for angle in order.rotation))
        x, state = _take(x, line, lambda first: forward(first, Order(rotation), None, True)[1])
        x, after = forward(x, order, state, True)
        return _pass_on(x, line, after), None

    return shared


def _take(x: Tensor, line: Line, state_after: Callable[[Tensor], Any]) -> tuple[Tensor, Any]:
    """Receive the state of the tokens before x (B, T, D), like that after x's first token: (x, state)."""
    if line.place == 0:
        return x, None
    with torch.no_grad():
        leaves, form = tree_flatten(state_after(x[:, :1]))
    x, *received = _Take.apply(x, line, *(leaf for leaf in leaves if isinstance(leaf, Tensor)))
    states, n_seen = iter(received), line.place * x.shape[1]  # what is no tensor is the number of tokens seen
    return x, tree_unflatten([next(states) if isinstance(leaf, Tensor) else n_seen for leaf in leaves], form)


def _pass_on(x: Tensor, line: Line, state: Any) -> Tensor:
    """Send the state after x to the next process; returns x, through which the state's gradients come back."""
    tensors = [leaf for leaf in tree_flatten(state)[0] if isinstance(leaf, Tensor)]
    return x if line.place == line.size - 1 else _PassOn.apply(x, line, *tensors)


class _Take(torch.autograd.Function):
    """Receives states, and sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line, *like: Tensor) -> tuple[Tensor, ...]:
        ctx.line = line
        return x.view_as(x), *(line.receive(state, -1) for state in like)

    @staticmethod
    def backward(ctx: Any, g: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        for gradient in gradients:
            ctx.line.send(gradient, -1)
        return g, None, *(None for _ in gradients)


class _PassOn(torch.autograd.Function):
    """Sends states, and receives their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line, *states: Tensor) -> Tensor:
        ctx.line, ctx.like = line, [torch.empty_like(state, device="meta") for state in states]
        for state in states:
            line.send(state, +1)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return g, None, *(ctx.line.receive(like, +1) for like in ctx.like)
