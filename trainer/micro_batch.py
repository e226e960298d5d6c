"""runtime.micro_batch=auto: finds the most sequences that fit in a GPU's memory, by trying."""

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import nn

from common.console import say
from common.memory import is_out_of_memory
from common.numbers import ceil_div
from common.settings import UserError
from runtime.device import Compute, device_name, not_compiled
from runtime.distributed import World
from trainer.step import accumulate_gradients

SPARE = 0.12
"""Share of a GPU left free: for libraries, for fragmentation in a long run, and for compiled code,
which may keep 8 % more (tools/step_memory.py)."""


def choose_micro_batch(
    summed_loss: nn.Module, share: int, seq_len: int, compute: Compute, world: World
) -> int:
    """The largest of equal micro-batches that fits in every process. Prints its choice.

    Trials are not compiled: compiling again and again would delay the first step.

    Args:
        summed_loss: ready for training: wrapped, compiled, on its GPU. Its weights do not change,
            and must not be sharded: other processes would wait forever for one that runs out of
            memory. Its gradients are None afterwards.
        share: the most sequences that a process has in a step.

    Raises:
        UserError: not even one sequence fits.
    """
    # Try in the memory of the whole GPU, with some of it reserved.
    memory = torch.cuda.mem_get_info(world.device)[1]
    params = list(summed_loss.parameters())

    def fits(size: int) -> bool:
        """Whether a micro-batch in the middle of a step fits in memory here, with some to spare.

        Gradients exist already. They are not averaged, because other processes would wait forever
        for one that runs out of memory.
        """
        try:
            reserve = torch.empty(int(SPARE * memory), dtype=torch.uint8, device=world.device)
            for p in params:
                p.grad = torch.zeros_like(p)
            ids = torch.zeros(size, seq_len, dtype=torch.int64, device=world.device)
            accumulate_gradients(summed_loss, [(ids, ids)], compute, world, sync=False)
            del reserve
            return True
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            for p in params:
                p.grad = None
            # Blocks of this size must not fragment the memory of the next trial.
            torch.cuda.empty_cache()

    # A size must fit in every process.
    with not_compiled(summed_loss):
        chosen = find_largest_fit(lambda size: all(world.exchange(fits(size))), share)
    where = f"the {memory / 1e9:.1f} GB of {device_name(world.device)}"
    if chosen == 0:
        raise UserError(
            f"runtime.micro_batch=auto: one sequence does not fit in {where}: "
            f"use a smaller model or a smaller {seq_len=}"
        )
    say(f"runtime.micro_batch=auto: {chosen} of up to {share} sequences, in {where}")
    return chosen


def find_largest_fit(fits: Callable[[int], bool], share: int) -> int:
    """The size of the fewest equal micro-batches of a share that fit; 0: not even one sequence
    does."""
    if fits(share):
        return share
    numbers = range(2, share + 1)  # of micro-batches
    index = bisect_left(numbers, True, key=lambda n: fits(ceil_div(share, n)))
    return ceil_div(share, numbers[index]) if index < len(numbers) else 0
