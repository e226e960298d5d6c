"""Sequences too long for one pass: in chunks, one after the other, or in stretches, each on a process of its own.

Both need a model whose state has one size: all that a layer must know of earlier tokens.

With runtime.sequence_chunk, memory is that of a chunk, and of a state for each. A sequence is read twice. The first
time, from its beginning and without gradients, only the state before each chunk is kept. The second time, the last
chunk comes first: it is read again from its state, and its backward pass also gives the gradient of that state, which
is where the backward pass of the chunk before begins. The sum is the gradient of the whole sequence.

With runtime.context_parallel, a process takes the state from the process before it, computes its stretch, and passes
the state after it on. It then computes its next layer while the next process computes this one. Gradients of states go
the opposite way in the backward pass. With n processes and L layers, this takes (L + n - 1) / L times as long as if no
process ever waited.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from model.gpt import GPTState
from model.state import restored, tensors_of
from trainer.distributed import SequenceGroup, World
from trainer.runtime import Runtime


def backward_in_chunks(
    summed_loss: nn.Module,
    token_ids: Tensor,
    targets: Tensor,
    runtime: Runtime,
    world: World,
    *,
    scale: float | Tensor,
    sync: bool,
    name: str,
) -> list[Tensor]:
    """Add the gradient of scale x loss of sequences; returns the summed losses of their chunks, the last one first.

    Args:
        summed_loss: a SummedLoss, possibly wrapped by World.wrap.
        token_ids, targets: (B, T); T may be longer than runtime.sequence_chunk.
        sync: average the gradients over the processes in the last backward pass.
        name: of the micro-batch, for the deadline's message.
    """
    assert runtime.sequence_chunk is not None
    ids, wanted = (
        token_ids.split(runtime.sequence_chunk, dim=1),
        targets.split(runtime.sequence_chunk, dim=1),
    )
    before = states_before(summed_loss, ids, runtime, world, name)
    losses: list[Tensor] = []
    gradients: list[Tensor | None] = []  # with respect to the state after the chunk
    for number in reversed(range(len(ids))):
        world.at(f"{name}, chunk {number + 1}: forward and backward")
        state, after = tree_map_only(Tensor, _leaf, before.pop()), None
        with world.sync_gradients(summed_loss, now=sync and number == 0):
            with runtime.autocast():
                loss, after = summed_loss(ids[number], wanted[number], state, True)
            later = [*zip(_floats(after), gradients, strict=True)] if gradients else []
            roots = [(loss * scale, None), *((x, g) for x, g in later if g is not None)]
            torch.autograd.backward([x for x, _ in roots], [g for _, g in roots])
        gradients = [x.grad for x in _floats(state)]
        losses.append(loss.detach())
        _return_memory(number, token_ids)
    return losses


def states_before(
    summed_loss: nn.Module,
    chunks: tuple[Tensor, ...],
    runtime: Runtime,
    world: World,
    name: str = "",
) -> list[GPTState | None]:
    """The state before each chunk, (B, T) ids, without gradients; None before the first."""
    before: list[GPTState | None] = [None]
    for number, ids in enumerate(chunks[:-1], start=1):
        world.at(f"{name}, chunk {number}: state")
        with torch.no_grad(), runtime.autocast():
            before.append(summed_loss(ids, None, before[-1], True)[1])
        _return_memory(number, ids)
    return before


def _return_memory(number: int, ids: Tensor) -> None:
    """After every fourth chunk, return freed memory to the system: glibc keeps it, and the process grows.

    After every chunk, it would cost 7 to 13 % of the time, because memory that is new to a process is slow.
    """
    if ids.is_cpu and number % 4 == 0:
        getattr(ctypes.CDLL(None), "malloc_trim", lambda spare: 0)(
            0
        )  # other C libraries do not have it


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())


def _floats(state: Any) -> list[Tensor]:
    return [x for x in tree_leaves(state) if isinstance(x, Tensor) and x.is_floating_point()]


def share_sequences(group: SequenceGroup) -> Callable[..., Any]:
    """Return a `call_layer` for GPT.features: it takes states from the process before this one, and passes them on.

    Only where gradients are computed: elsewhere, as in evaluation, every process computes whole sequences.
    """
    return partial(_shared, group)


def _shared(
    group: SequenceGroup, module: Any, x: Tensor, state: Any, *others: Any, **options: bool
) -> tuple[Any, ...]:
    """module(x, state, ...) -> (x, ..., state), with the state of the process before this one.

    Gradients of states come and go with those of x.
    """
    if not torch.is_grad_enabled():
        return module(x, state, *others, **options)
    state = module.initial_state(len(x), x.device)  # before the first token
    like = tensors_of(state)
    if group.place > 0:
        x, *received = _Take.apply(x, group, *like.values())
        state = restored(state, dict(zip(like, received, strict=True)))
    x, *between, after = module(x, state, *others, **dict.fromkeys(options, True))  # return_state
    if group.place < group.size - 1:
        x = _PassOn.apply(
            x, group, *(own.to(like[name].dtype) for name, own in tensors_of(after).items())
        )
    return x, *between, after


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
        received = (
            ctx.group.receive(like, +1) if like.is_floating_point() else None for like in ctx.like
        )
        return g, None, *received
