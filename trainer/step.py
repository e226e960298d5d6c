"""One training step: forward and backward passes over micro-batches, clipping, and the optimizer's update."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model.gpt import GPT, GPTState, call_layer
from model.ops.log_attention.exact import recomputed_tiles
from trainer.distributed import World
from trainer.long import backward_in_chunks
from trainer.runtime import Runtime

NO_TARGETS = "none of its targets is counted"
"""Why a step was refused that data.loss=answers leaves without answers."""

MicroBatches = Sequence[tuple[Tensor, Tensor]]
"""Token ids and targets, int64 (sequences, seq_len); targets below 0 are not counted. Keep them on the CPU, in
pinned memory if a GPU trains: counting targets on the GPU would wait for it."""


class SummedLoss(nn.Module):
    """The loss as a module, so that DDP and torch.compile see one forward pass from tokens to loss."""

    def __init__(self, gpt: GPT, call_layer: Callable[..., Any] = call_layer) -> None:
        """`call_layer` is that of GPT.features."""
        super().__init__()
        self.gpt = gpt
        self.call_layer = call_layer

    def forward(
        self,
        token_ids: Tensor,
        targets: Tensor | None,
        state: GPTState | None = None,
        return_state: bool = False,
    ) -> Any:
        """(B, T) ids and targets -> the sum of the losses, in nats, and with `return_state` the state after them."""
        return self.gpt.summed_loss(token_ids, targets, state, return_state, self.call_layer)


class StepResult(NamedTuple):
    """The result of a step, the same in all processes."""

    loss: float
    """Mean over all valid tokens of the global batch, in nats."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    stop: bool
    """Whether any process was asked to stop."""
    exact_tiles: int
    """Log-attention tiles recomputed exactly, summed over processes. Recomputed forward passes count too."""
    refused: str | None
    """Why the weights were not updated, with the gradients left in place; None: the weights were updated."""


def train_step(
    summed_loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: MicroBatches,
    runtime: Runtime,
    world: World | None = None,
    *,
    grad_clip: float | None = None,
    refuse: Callable[[float, float], str | None] = lambda loss, grad_norm: None,
    asked_to_stop: Callable[[], bool] = lambda: False,
    name: str = "step",
) -> StepResult | None:
    """Update the weights once, by the gradient of the mean loss over all valid tokens of the global batch.

    How the batch is shared among processes and micro-batches changes the result by rounding only: each micro-batch's
    summed loss is divided by the global count of tokens.

    Args:
        summed_loss: (B, T) ids and targets -> summed loss; a SummedLoss, possibly wrapped by World.wrap.
        micro_batches: this process's part of the global batch.
        world: the processes that train together; None: this one alone.
        grad_clip: largest norm of the whole gradient; None: not clipped.
        refuse: gets loss and gradient norm before the update; returns why it must not happen, or None.
        asked_to_stop: asked after the backward passes; the answer travels with the loss, so that all processes stop
            after the same step. A process that is alone is also asked before each micro-batch.
        name: the step's name, for the deadline's message.

    Returns:
        None if this process is alone and was asked to stop before its last micro-batch: the weights are unchanged.
    """
    world = world or World(runtime.device)
    params = list(summed_loss.parameters())
    tiles_before = (tiles_now := recomputed_tiles("forward", params[0].device)).clone()  # (1,)
    n_valid = sum(float((targets >= 0).sum()) for _, targets in micro_batches)
    n_targets = world.sum(torch.full((), n_valid, dtype=torch.float64, device=world.device))
    valid = n_targets.clamp(min=1)
    abandon = asked_to_stop if world.size == 1 else lambda: False
    own_loss = accumulate_gradients(
        summed_loss,
        micro_batches,
        runtime,
        world,
        scale=world.size / valid,
        abandon=abandon,
        name=name,
    )
    if own_loss is None:
        return None
    world.at(f"{name}: loss")
    own = (
        own_loss,
        own_loss.new_full((), asked_to_stop()),
        (tiles_now - tiles_before).double().squeeze(),
    )
    total, asked, tiles = world.sum(torch.stack(own))
    world.at(f"{name}: optimizer")
    norm = world.unshard(nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]))
    # Nothing else in a step makes the CPU wait for a GPU.
    results = [total / valid, norm.double(), asked, tiles, n_targets]
    loss, grad_norm, asked, tiles, counted = torch.stack(results).tolist()
    refused = refuse(loss, grad_norm) if counted else NO_TARGETS
    if refused is None:
        if grad_clip is not None:
            nn.utils.clip_grads_with_norm_(params, grad_clip, norm)
        optimizer.step()
        optimizer.zero_grad()
    return StepResult(loss, grad_norm, asked > 0, int(tiles), refused)


def accumulate_gradients(
    summed_loss: nn.Module,
    micro_batches: MicroBatches,
    runtime: Runtime,
    world: World,
    *,
    scale: float | Tensor = 1.0,
    sync: bool = True,
    abandon: Callable[[], bool] = lambda: False,
    name: str = "step",
) -> Tensor | None:
    """Add the gradient of scale x loss of each micro-batch; returns the sum of the losses, float64.

    DDP averages gradients over processes, so `scale` includes the number of processes as a factor.

    Args:
        sync: average the gradients over the processes in the last backward pass.
        abandon: is asked before each micro-batch; if it returns True, the rest is left out and None is returned.
    """
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for i, micro_batch in enumerate(micro_batches, start=1):
        if abandon():
            return None
        token_ids, targets = (ids.to(world.device, non_blocking=True) for ids in micro_batch)
        last = sync and i == len(micro_batches)
        if runtime.sequence_chunk is not None and token_ids.shape[1] > runtime.sequence_chunk:
            which = f"{name}: micro-batch {i} of {len(micro_batches)}"
            how: dict[str, Any] = {"scale": scale, "sync": last, "name": which}
            for loss in backward_in_chunks(summed_loss, token_ids, targets, runtime, world, **how):
                total += loss
            continue
        with world.sync_gradients(summed_loss, now=last):
            world.at(f"{name}: forward {i} of {len(micro_batches)}")
            with runtime.autocast():
                loss = summed_loss(token_ids, targets)
            world.at(f"{name}: backward {i} of {len(micro_batches)}")
            (loss * scale).backward()
        total += loss.detach()
    return total
