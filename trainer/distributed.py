"""Several processes as one: the only file that imports torch.distributed."""

import contextlib
import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.console import console


@dataclass(frozen=True)
class World:
    """This process among those that train together. One process alone is a world of size 1."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks to people."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """The sum of `value` over all processes, on all of them."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def wait_for_all(self) -> None:
        """Return once every process has come here."""
        if self.size > 1:
            dist.barrier()

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module with its gradients averaged over all processes."""
        return DistributedDataParallel(module) if self.size > 1 else module

    def sync_gradients(self, module: nn.Module, now: bool) -> AbstractContextManager[None]:
        """Average gradients in the backward passes inside (`now`), or leave that to a later micro-batch."""
        return contextlib.nullcontext() if now or self.size == 1 else module.no_sync()  # type: ignore[operator]


@contextlib.contextmanager
def join_world(device: torch.device) -> Iterator[World]:
    """Join the processes that torchrun started beside this one; alone, do nothing. Only rank 0 prints."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if size == 1:
        yield World(device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    console.quiet = rank != 0
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(device, rank, size)
    finally:
        # DDP's reducer must be gone before the group. If it were the last to hold the group, it would join gloo's
        # threads while it holds the interpreter's lock, and one of them may need that lock to let go of a tensor.
        gc.collect()
        dist.destroy_process_group()
