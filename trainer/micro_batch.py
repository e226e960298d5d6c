"""runtime.micro_batch=auto: finds the most sequences whose forward and backward pass fit in memory, by trying."""

import contextlib
import os
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

from common.console import say
from common.settings import UserError
from trainer.distributed import World
from trainer.runtime import Runtime, device_name
from trainer.step import accumulate_gradients

SPARE = 0.05  # share of a GPU left free for libraries and for fragmentation in a long run
_GB = 1e9


def choose_micro_batch(
    loss_module: nn.Module, optimizer: torch.optim.Optimizer, share: int, seq_len: int, runtime: Runtime, world: World
) -> int:
    """The largest micro-batch that fits in every process, the same in all. Prints its choice.

    Weights, optimizer and random numbers do not change; gradients are None afterwards.

    Args:
        loss_module: (m, seq_len) ids and targets -> loss, ready for training: wrapped, compiled, on its device.
        share: most sequences that a process has in a step; the result is at most this.

    Raises:
        UserError: not even one sequence fits; or the weights are sharded, so that other processes would wait forever
            for one that runs out of memory.
    """
    if any(hasattr(p, "to_local") for p in loss_module.parameters()):
        raise UserError(
            "runtime.micro_batch=auto does not work with runtime.strategy=fsdp, whose processes wait for each "
            "other in every layer: give a number, such as runtime.micro_batch=1, or use runtime.strategy=ddp"
        )
    trials = _Trials(loss_module, optimizer, seq_len, runtime, world)
    most = _least(trials.most(share), world)
    chosen = _largest(lambda size: _least(int(trials.fits(size)), world) == 1, most)
    if any(module._compiled_call_impl is not None for module in loss_module.modules()):
        torch.compiler.reset()  # code compiled for many sizes is slower than code for one
    room = f"{trials.room / _GB:.1f} GB"
    if chosen == 0:
        raise UserError(
            f"runtime.micro_batch=auto: not even one sequence of seq_len={seq_len} fits in the {room} of "
            f"{device_name(world.device).strip(',')}: use a smaller model or a smaller seq_len"
        )
    need = max(trials.needs[chosen] / _GB, 0.1)
    say(f"runtime.micro_batch=auto: {chosen} of up to {share} sequences, needs about {need:.1f} of {room}")
    return chosen


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the machine is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _largest(fits: Callable[[int], bool], most: int) -> int:
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


class _Trials:
    """Trial passes of one process, with everything in memory that training keeps there."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, seq_len: int, runtime: Runtime, world: World
    ) -> None:
        self.module, self.seq_len, self.runtime, self.world = module, seq_len, runtime, world
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.without_state = [p for p in self.params if p not in optimizer.state]
        self.cuda = world.device.type == "cuda"
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))  # if unknown, assume all processes
        self.room = torch.cuda.mem_get_info(world.device)[1] if self.cuda else available_memory() // beside  # bytes
        self.needs: dict[int, int] = {}
        """Bytes that a step of each size needs, measured on a GPU, predicted on a CPU."""

    def most(self, share: int) -> int:
        """The largest size worth trying. A GPU reports that memory is out; on a CPU, the kernel kills the process.

        So on a CPU, only sizes predicted to take at most half of the memory are tried. Besides what they save, passes
        need working memory, up to two thirds of that in models of two or more layers.
        """
        if self.cuda:
            return share
        try:
            one, two = self._saved(1), self._saved(2)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return 0
        each, weights = max(1, two - one), sum(p.nbytes for p in [*self.params, *2 * self.without_state])
        self.needs = {size: one + weights + (size - 1) * each for size in range(1, share + 1)}
        return sum(need <= self.room / 2 for need in self.needs.values())

    def fits(self, size: int) -> bool:
        """Whether a forward and a backward pass over `size` sequences fit in memory. Other errors are raised."""
        self.world.at(f"start: trial of {size} sequences")
        try:
            self._step(size)
            return True
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return False
        finally:
            for p in self.params:
                p.grad = None
            if self.cuda:
                torch.cuda.empty_cache()  # blocks of this size must not fragment the memory of the next trial

    def _step(self, size: int) -> None:
        """Run a micro-batch in the middle of a step: gradients exist already, and they are not averaged, because other
        processes would wait forever for one that runs out of memory.
        """
        device = self.world.device
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(device)
        spare = torch.empty(int(SPARE * self.room) if self.cuda else 0, dtype=torch.uint8, device=device)
        means = [torch.empty_like(p) for p in 2 * self.without_state]  # that Adam will allocate
        for p in self.params:
            p.grad = torch.zeros_like(p)
        accumulate_gradients(self.module, [self._batch(size)], self.runtime, self.world, sync=False)
        del means
        if self.cuda:
            self.needs[size] = torch.cuda.max_memory_allocated(device) - spare.nbytes

    def _saved(self, size: int) -> int:
        module = getattr(self.module, "module", self.module)  # not DDP, which would expect a backward pass
        # forward() is not compiled: a compiled module would not see the hooks
        return saved_for_backward(lambda: module.forward(*self._batch(size)), self.runtime.autocast(), module)

    def _batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Token ids and targets that are all 0."""
        ids = torch.zeros(size, self.seq_len, dtype=torch.int64, device=self.world.device)
        return ids, ids.clone()


def saved_for_backward(
    forward: Callable[[], object], autocast: AbstractContextManager[object], module: nn.Module
) -> int:
    """Bytes that a forward pass keeps for the backward pass, without the module's weights. Counts each storage once."""
    kept: dict[int, Tensor] = {}  # by address: no address is reused while all tensors are held

    def keep(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # without the graph, which would hold itself
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        forward()
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still allocate: limited by the machine, its own limit and its control groups."""
    page, limit = os.sysconf("SC_PAGE_SIZE"), resource.getrlimit(resource.RLIMIT_AS)[0]
    rooms = []
    if limit != resource.RLIM_INFINITY:
        rooms += [limit - int(line.split()[0]) * page for line in _lines(proc / "self" / "statm")]
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            rooms.append(int(line.split()[1]) * 1024)
    for line in _lines(proc / "self" / "cgroup"):  # "4:memory:/a/b" (version 1), "0::/a/b" (version 2)
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = top / path.strip("/")
        for group in [here, *here.parents]:
            if group.is_relative_to(top):  # a container may see its own group as the root
                rooms += _group_room(group, *names)
    return max(0, min(rooms, default=os.sysconf("SC_PHYS_PAGES") * page))


def _group_room(group: Path, limit: str, used: str, cache: str) -> list[int]:
    """Bytes that a control group may still allocate, counting its file cache as free; empty if it has no limit."""
    with contextlib.suppress(OSError, ValueError):  # "max" is not a number
        stat = dict(line.split() for line in _lines(group / "memory.stat"))
        room = int((group / limit).read_text()) - int((group / used).read_text()) + int(stat.get(cache, 0))
        return [room]
    return []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
