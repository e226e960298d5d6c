"""One training step: passes over micro-batches, clipping, and the optimizer's update."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.numbers import ceil_div
from data.loader import TrainBatches
from model.gpt import GPT, GPTState
from runtime.device import Compute
from runtime.distributed import SequenceGroup, World
from trainer.long_sequences import backward_in_chunks, share_sequences

MicroBatches = Sequence[tuple[Tensor, Tensor]]
"""Token ids and targets, int64 (sequences, seq_len); targets below 0 are not counted. Keep them on
the CPU, in pinned memory if a GPU trains: counting targets on the GPU would wait for it."""


def local_micro_batches(
    batches: TrainBatches, step: int, group: SequenceGroup, micro_batch: int, device: torch.device
) -> MicroBatches:
    """This process's share of the batch of a step."""
    first = group.index * batches.batch_size // group.count
    stop = (group.index + 1) * batches.batch_size // group.count
    # Micro-batches have one size; the last may be smaller.
    n_micro_batches = ceil_div(stop - first, micro_batch)
    size = ceil_div(stop - first, n_micro_batches)
    splits = []  # of token ids, and of targets
    for array in batches.batch(step, first, stop):
        ids = torch.from_numpy(array).chunk(group.size, dim=1)[group.place]
        if device.type == "cuda":
            ids = ids.contiguous().pin_memory()  # other memory is copied twice
        splits.append(ids.split(size))
    return list(zip(*splits, strict=True))


class SummedLoss(nn.Module):
    """The loss as a module, so that DDP and torch.compile see one forward pass from ids to loss."""

    def __init__(self, gpt: GPT, group: SequenceGroup | None = None) -> None:
        """`group`: the processes that share sequences; None: each computes whole ones."""
        super().__init__()
        self.gpt = gpt
        self.group = group

    def forward(
        self,
        token_ids: Tensor,
        targets: Tensor | None,
        state: GPTState | None = None,
        return_state: bool = False,
    ) -> Any:
        """(B, T) ids and targets -> summed loss in nats, and the state after it if asked for."""
        with share_sequences(self.gpt, self.group):
            return self.gpt.summed_loss(token_ids, targets, state, return_state)


class StepResult(NamedTuple):
    """The result of a step, the same in all processes."""

    loss: float
    """Mean over all valid tokens of the global batch, in nats."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    stop: bool
    """Whether any process was asked to stop."""
    refused: str | None
    """Why the weights were not updated (gradients are still there); None: they were updated."""


def train_step(
    summed_loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: MicroBatches,
    compute: Compute,
    world: World | None = None,
    *,
    grad_clip: float | None = None,
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> StepResult | None:
    """Update the weights once, by the gradient of the mean loss over all valid tokens of the batch.

    How the global batch is shared among processes and micro-batches changes the result by rounding
    only: each micro-batch's summed loss is divided by the global count of tokens.

    Args:
        summed_loss: (B, T) ids and targets -> summed loss; a SummedLoss, possibly wrapped.
        micro_batches: this process's share of the global batch.
        world: the processes that train together; None: this one alone.
        grad_clip: largest norm of the whole gradient; None: not clipped.
        asked_to_stop: asked after the backward passes; the answer travels with the loss, so that
            all processes stop after the same step. A process that is alone is also asked before
            each micro-batch.

    Returns:
        None if this process is alone and was asked to stop before its last micro-batch. The weights
        are then unchanged.
    """
    world = world or World(compute.device)
    params = list(summed_loss.parameters())
    # Count the targets of the global batch: the loss is their mean.
    n_valid_here = sum(float((targets >= 0).sum()) for _, targets in micro_batches)
    n_valid = world.sum(torch.full((), n_valid_here, dtype=torch.float64, device=world.device))
    # Add up the gradients of all micro-batches. Processes average theirs.
    loss_here = accumulate_gradients(
        summed_loss,
        micro_batches,
        compute,
        world,
        scale=world.size / n_valid,
        abandon=asked_to_stop if world.size == 1 else lambda: False,
    )
    if loss_here is None:
        return None
    # Add up the losses, and who was asked to stop, in one exchange.
    asked_here = loss_here.new_full((), asked_to_stop())
    sums = world.sum(torch.stack([loss_here, asked_here]))
    norm = world.unshard(nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]))
    # Nothing else in a step makes the CPU wait for a GPU.
    results = torch.stack([sums[0] / n_valid, norm.double(), sums[1]])
    loss, grad_norm, asked = results.tolist()
    # Update the weights, unless numbers are not finite.
    refused = why_bad(loss, grad_norm)
    if refused is None:
        if grad_clip is not None:
            nn.utils.clip_grads_with_norm_(params, grad_clip, norm)
        optimizer.step()
        optimizer.zero_grad()
    return StepResult(loss, grad_norm, asked > 0, refused)


def why_bad(loss: float, grad_norm: float) -> str | None:
    """Return why a step must not change the weights, or None; the same in all processes."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return None
    return f"loss is {loss} and the gradient's norm {grad_norm}"


def accumulate_gradients(
    summed_loss: nn.Module,
    micro_batches: MicroBatches,
    compute: Compute,
    world: World,
    *,
    scale: float | Tensor = 1.0,
    sync: bool = True,
    abandon: Callable[[], bool] = lambda: False,
) -> Tensor | None:
    """Add the gradient of scale x loss of each micro-batch; returns the sum of the losses, float64.

    DDP averages gradients over processes, so `scale` includes the number of processes as a factor.

    Args:
        sync: average the gradients over the processes in the last backward pass.
        abandon: asked before each micro-batch; if it returns True, the rest is left out and None is
            returned.
    """
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for number, (token_ids, targets) in enumerate(micro_batches, start=1):
        if abandon():
            return None
        token_ids = token_ids.to(world.device, non_blocking=True)
        targets = targets.to(world.device, non_blocking=True)
        chunk = compute.sequence_chunk
        is_long = chunk is not None and token_ids.shape[1] > chunk
        backward = backward_in_chunks if is_long else backward_whole
        sync_now = sync and number == len(micro_batches)
        total += backward(summed_loss, token_ids, targets, compute, world, scale, sync_now)
    return total


def backward_whole(
    summed_loss: nn.Module,
    token_ids: Tensor,
    targets: Tensor,
    compute: Compute,
    world: World,
    scale: float | Tensor,
    sync: bool,
) -> Tensor:
    """Add the gradient of scale x loss of sequences (B, T); returns their summed loss, detached."""
    with world.sync_gradients(summed_loss, now=sync):
        with compute.autocast():
            loss = summed_loss(token_ids, targets)
        (loss * scale).backward()
    return loss.detach()
