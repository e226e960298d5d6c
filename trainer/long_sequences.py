"""Sequences too long for one pass: in chunks one after the other, or split among processes.

Both need a model whose state has one size: all that a layer must know of earlier tokens.

With runtime.sequence_chunk, a step needs the memory of one chunk, and of one state for each chunk.
A sequence is read twice. The first time, from its beginning and without gradients, only the state
before each chunk is kept. The second time, the last chunk comes first: it is read again from its
state, and its backward pass also gives the gradient of that state. The backward pass of the chunk
before it begins with that gradient. The sum is the gradient of the whole sequence.

With runtime.context_parallel, a process takes the state from the process before it, computes its
chunk, and passes the state after it on. It then computes its next layer while the next process
computes this one. Gradients of states go the opposite way in the backward pass. With n processes
and L layers, this takes (L + n - 1) / L times as long as if no process ever waited.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from model.gpt import GPT, GPTState
from model.state_trees import name_tensors, restore_state
from runtime.device import Compute
from runtime.distributed import SequenceGroup, World


def backward_in_chunks(
    summed_loss: nn.Module,
    token_ids: Tensor,
    targets: Tensor,
    compute: Compute,
    world: World,
    scale: float | Tensor,
    sync: bool,
) -> Tensor:
    """Add the gradient of scale x loss of sequences; returns their summed loss, detached, float64.

    Args:
        summed_loss: a SummedLoss, possibly wrapped by World.wrap.
        token_ids, targets: (B, T); T may be longer than runtime.sequence_chunk.
        sync: average the gradients over the processes in the last backward pass.
    """
    assert compute.sequence_chunk is not None
    ids_of_chunks = token_ids.split(compute.sequence_chunk, dim=1)
    targets_of_chunks = targets.split(compute.sequence_chunk, dim=1)
    states = states_before(summed_loss, ids_of_chunks, compute)
    total = torch.zeros((), dtype=torch.float64, device=token_ids.device)
    gradients: list[Tensor | None] | None = None  # of the state after the chunk; last chunk: None
    for number in reversed(range(len(ids_of_chunks))):
        state = tree_map_only(Tensor, _leaf, states.pop())
        with world.sync_gradients(summed_loss, now=sync and number == 0):
            with compute.autocast():
                loss, state_after = summed_loss(
                    ids_of_chunks[number], targets_of_chunks[number], state, True
                )
            roots = [loss * scale]
            gradients_of_roots: list[Tensor | None] = [None]
            if gradients is not None:
                for tensor, gradient in zip(_floats(state_after), gradients, strict=True):
                    if gradient is not None:
                        roots.append(tensor)
                        gradients_of_roots.append(gradient)
            torch.autograd.backward(roots, gradients_of_roots)
        gradients = [tensor.grad for tensor in _floats(state)]
        total += loss.detach()
    return total


def states_before(
    summed_loss: nn.Module, ids_of_chunks: tuple[Tensor, ...], compute: Compute
) -> list[GPTState | None]:
    """The state before each chunk, (B, T) ids, without gradients; None before the first."""
    states: list[GPTState | None] = [None]
    for ids in ids_of_chunks[:-1]:
        with torch.no_grad(), compute.autocast():
            _, state = summed_loss(ids, None, states[-1], True)
        states.append(state)
    return states


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())


def _floats(state: Any) -> list[Tensor]:
    return [x for x in tree_leaves(state) if isinstance(x, Tensor) and x.is_floating_point()]


@contextmanager
def share_sequences(gpt: GPT, group: SequenceGroup | None) -> Iterator[None]:
    """Let the model compute a process's part of sequences that a group shares.

    Each layer takes its state from the process before this one, and passes it to the next. It does
    so only where gradients are computed: in evaluation, a process computes whole sequences.
    """
    layers = [gpt.position, *gpt.blocks]
    if gpt.config.ngrams:
        layers.append(gpt.ngrams)
    with ExitStack() as hooks:
        if group is not None and group.size > 1 and torch.is_grad_enabled():
            for layer in layers:
                for handle in (
                    layer.register_forward_pre_hook(partial(_receive, group), with_kwargs=True),
                    layer.register_forward_hook(partial(_send, group)),
                ):
                    hooks.callback(handle.remove)
        yield


def _receive(
    group: SequenceGroup, layer: Any, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace a layer's state by that of the process before this one.

    _Receive and _Send also return x, so that the backward pass of x reaches the states.
    """
    x, _, *more = inputs
    state = layer.initial_state(len(x), x.device)  # before the first token
    if group.place > 0:
        like = name_tensors(state)
        x, *received = _Receive.apply(x, group, *like.values())
        state = restore_state(state, dict(zip(like, received, strict=True)))
    return (x, state, *more), dict.fromkeys(options, True)  # return_state


def _send(
    group: SequenceGroup, layer: Any, inputs: tuple[Any, ...], results: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Pass the state after these tokens to the next process."""
    if group.place == group.size - 1:
        return results
    x, *others, state = results
    like = name_tensors(layer.initial_state(len(x), x.device))
    to_send = [tensor.to(like[name].dtype) for name, tensor in name_tensors(state).items()]
    return _Send.apply(x, group, *to_send), *others, state


class _Receive(torch.autograd.Function):
    """Receives states, and sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup, *like: Tensor) -> tuple[Tensor, ...]:
        states = [group.receive(state, -1) for state in like]
        ctx.group = group
        ctx.floats = [state.is_floating_point() for state in states]
        ctx.mark_non_differentiable(*(state for state in states if not state.is_floating_point()))
        return x.view_as(x), *states

    @staticmethod
    def backward(ctx: Any, g: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        for gradient, is_float in zip(gradients, ctx.floats, strict=True):
            if is_float:
                ctx.group.send(gradient, -1)
        return g, None, *(None for _ in gradients)


class _Send(torch.autograd.Function):
    """Sends states, and receives their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup, *states: Tensor) -> Tensor:
        ctx.group = group
        ctx.like = [torch.empty_like(state, device="meta") for state in states]
        for state in states:
            group.send(state, +1)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = []
        for like in ctx.like:
            gradients.append(ctx.group.receive(like, +1) if like.is_floating_point() else None)
        return g, None, *gradients
