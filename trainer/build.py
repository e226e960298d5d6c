"""Builds a run's model from its seed."""

import contextlib

import torch
from torch import nn

from model.gpt import GPT
from trainer.config import TrainConfig
from trainer.context import share_sequences
from trainer.distributed import SequenceGroup, World
from trainer.runtime import Runtime, maybe_compile
from trainer.step import SummedLoss
from trainer.transfer import scale_weights


def build_model(
    config: TrainConfig, runtime: Runtime, world: World, group: SequenceGroup, eot_id: int | None
) -> tuple[GPT, nn.Module]:
    """Return the model with initial weights, on its device, and its summed loss, which the processes share.

    Args:
        group: the processes that share sequences.
        eot_id: as for `GPT`.
    """
    torch.manual_seed(config.seed)
    fsdp = config.runtime.strategy == "fsdp"
    with torch.device("meta") if fsdp else contextlib.nullcontext():  # fsdp: for models that do not fit here
        gpt = GPT(config.model, eot_id).to(runtime.param_dtype)
    gpt.recompute = config.runtime.recompute
    if group.size > 1:
        share_sequences(gpt, group)
    summed_loss = SummedLoss(gpt)
    maybe_compile(gpt.blocks if fsdp else [summed_loss], config.runtime, runtime, gpt)
    wrapped = world.wrap(summed_loss, fsdp, runtime.dtype)
    if fsdp:
        gpt.to_empty(device=world.device)
        gpt.init_weights(world.like)  # each process draws all weights, one at a time, and keeps its part
    scale_weights(gpt, config.optim.transfer)
    return gpt, wrapped
