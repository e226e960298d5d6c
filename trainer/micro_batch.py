"""runtime.micro_batch=auto: finds the most sequences whose forward and backward pass fit in memory, by trying."""

import os
from collections.abc import Callable

import torch
from torch import nn

from common.console import say
from common.memory import available_memory, out_of_memory
from common.settings import UserError
from trainer.distributed import World
from trainer.runtime import Runtime, device_name, is_compiled
from trainer.step import accumulate_gradients

SPARE = 0.05  # share of a GPU left free for libraries and for fragmentation in a long run


def choose_micro_batch(
    loss_module: nn.Module,
    share: int,
    seq_len: int,
    predict: Callable[[int], int],
    runtime: Runtime,
    world: World,
) -> int:
    """The largest micro-batch that fits in every process, the same in all. Prints its choice.

    A GPU reports when memory runs out, so every size may be tried. On a CPU, the kernel kills the process instead: only
    sizes that are predicted to take at most half of the memory are tried.

    Args:
        loss_module: (m, seq_len) ids and targets -> loss, ready for training: wrapped, compiled, on its device. Its
            weights do not change; its gradients are None afterwards.
        share: the most sequences that a process has in a step; the result is at most this.
        predict: the bytes that a step of so many sequences needs besides weights and optimizer.

    Raises:
        UserError: not even one sequence fits; or the weights are sharded, so that other processes would wait forever
            for one that runs out of memory.
    """
    params = list(loss_module.parameters())
    if any(hasattr(p, "to_local") for p in params):
        what = "runtime.micro_batch=auto does not work with runtime.strategy=fsdp, whose processes wait for each other"
        raise UserError(
            f"{what}: give a number, such as runtime.micro_batch=1, or use runtime.strategy=ddp"
        )
    if world.device.type == "cuda":
        room, most = torch.cuda.mem_get_info(world.device)[1], share
        spare = int(SPARE * room)
    else:
        room, spare = room_on_cpu(world), 0
        most = largest(lambda size: predict(size) <= room / 2, share)

    def fits(size: int) -> bool:
        """Whether a micro-batch in the middle of a step fits in memory here, with `spare` bytes left.

        Gradients exist already. They are not averaged, because other processes would wait forever for one that runs
        out of memory.
        """
        world.at(f"start: trial of {size} sequences")
        try:
            reserve = torch.empty(spare, dtype=torch.uint8, device=world.device)
            for p in params:
                p.grad = torch.zeros_like(p)
            ids = torch.zeros(size, seq_len, dtype=torch.int64, device=world.device)
            accumulate_gradients(loss_module, [(ids, ids)], runtime, world, sync=False)
            del reserve
            return True
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return False
        finally:
            for p in params:
                p.grad = None
            if world.device.type == "cuda":
                torch.cuda.empty_cache()  # blocks of this size must not fragment the memory of the next trial

    chosen = largest(lambda size: _least(fits(size), world) == 1, _least(most, world))
    if is_compiled(loss_module):
        torch.compiler.reset()  # code compiled for many sizes is slower than code for one
    how, place = (
        "runtime.micro_batch=auto",
        f"the {room / 1e9:.1f} GB of {device_name(world.device)}",
    )
    if chosen == 0:
        raise UserError(
            f"{how}: one sequence does not fit in {place}: use a smaller model or a smaller {seq_len=}"
        )
    say(f"{how}: {chosen} of up to {share} sequences, in {place}")
    return chosen


def room_on_cpu(world: World) -> int:
    """Bytes that each process on this machine may still take."""
    return available_memory() // int(
        os.environ.get("LOCAL_WORLD_SIZE", world.size)
    )  # if unknown, all are here


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest size up to `most` that fits, found by doubling, then bisecting; 0 if none does."""
    good, bad = 0, most + 1
    while good + 1 < bad:
        size = min(max(1, 2 * good), most) if bad > most else (good + bad) // 2
        if fits(size):
            good = size
        else:
            bad = size
    return good


def _least(value: int, world: World) -> int:
    """The minimum over all processes, on all of them."""
    return min(int(each) for each in world.gather(torch.tensor([value], device=world.device)))
