"""runtime.micro_batch=auto: the most sequences whose forward and backward pass fit in memory, found by trying them."""

import contextlib
import os
import resource
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from common.console import say
from common.settings import UserError
from trainer.distributed import World
from trainer.runtime import Runtime, device_name
from trainer.step import accumulate_gradients

SPARE = 0.05  # of a GPU: what libraries take later, and what a long run loses to gaps between tensors
_GB = 1e9


def choose_micro_batch(
    loss_module: nn.Module, optimizer: torch.optim.Optimizer, share: int, seq_len: int, runtime: Runtime, world: World
) -> int:
    """The largest micro-batch that fits in every process; the same on all. Says what it chose, in one line.

    Weights, optimizer and random numbers stay as they are; gradients are None afterwards.

    Args:
        loss_module: (m, seq_len) ids and targets -> loss, as it will be trained: wrapped, compiled, on its device.
        share: most sequences that a process has in a step; more are never chosen.

    Raises:
        UserError: not even one sequence fits; or the weights are sharded, and a process out of memory would leave the
            others waiting for it.
    """
    if any(hasattr(p, "to_local") for p in loss_module.parameters()):
        raise UserError(
            "runtime.micro_batch=auto cannot be tried out with runtime.strategy=fsdp, whose processes wait for each "
            "other in every layer: give a number, such as runtime.micro_batch=1, or use runtime.strategy=ddp"
        )
    trials = _Trials(loss_module, optimizer, seq_len, runtime, world)
    most = _least(trials.most(share), world)
    chosen = _largest(lambda size: _least(int(trials.fits(size)), world) == 1, most)
    if any(module._compiled_call_impl is not None for module in loss_module.modules()):
        torch.compiler.reset()  # what was compiled for many sizes is slower than what is compiled for one
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
    """Whether an error means that a device, or the machine, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest size up to `most` that fits, by doubling, then bisecting; 0 if not even 1 does."""
    good, bad = 0, most + 1
    while good + 1 < bad:
        size = min(max(1, 2 * good), most) if bad > most else (good + bad) // 2
        if fits(size):
            good = size
        else:
            bad = size
    return good


def _least(value: int, world: World) -> int:
    """The smallest of all processes' values, on all of them."""
    return min(int(each) for each in world.gather(torch.tensor([value], device=world.device)))


class _Trials:
    """Passes of a given size, with all in memory that training has there; one process's part."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, seq_len: int, runtime: Runtime, world: World
    ) -> None:
        self.module, self.seq_len, self.runtime, self.world = module, seq_len, runtime, world
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.without_state = [p for p in self.params if p not in optimizer.state]
        self.cuda = world.device.type == "cuda"
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))  # unknown: all processes are on this machine
        self.room = torch.cuda.mem_get_info(world.device)[1] if self.cuda else available_memory() // beside  # bytes
        self.needs: dict[int, int] = {}
        """Bytes that a step of a size needs, measured on a GPU, predicted on a CPU."""

    def most(self, share: int) -> int:
        """Sequences to try at most. A GPU fails in time; what takes too much of a CPU's memory the kernel kills.

        There, only what is predicted to take half of the memory is tried: passes have working memory too, up to two
        thirds of what they save in models of two layers and more.
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
        """Whether a forward and a backward pass over `size` sequences have the memory. Other errors pass."""
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
                torch.cuda.empty_cache()  # pieces of this size must not stand in the way of the next

    def _step(self, size: int) -> None:
        """A micro-batch that is not the first of its step, so there are gradients; nor the last, so none are shared:
        a process out of memory would not come there, and the others would wait for it.
        """
        device = self.world.device
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(device)
        spare = torch.empty(int(SPARE * self.room) if self.cuda else 0, dtype=torch.uint8, device=device)
        means = [torch.empty_like(p) for p in 2 * self.without_state]  # which Adam will keep
        for p in self.params:
            p.grad = torch.zeros_like(p)
        accumulate_gradients(self.module, [self._batch(size)], self.runtime, self.world, sync=False)
        del means
        if self.cuda:
            self.needs[size] = torch.cuda.max_memory_allocated(device) - spare.nbytes

    def _saved(self, size: int) -> int:
        """Bytes that a forward pass keeps for the backward pass, without the weights; each storage once."""
        kept: dict[int, Tensor] = {}  # by address: while all are held, none is used twice

        def keep(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()  # without the graph, which would hold itself
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        module = getattr(self.module, "module", self.module)  # not DDP, which would expect a backward pass
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), self.runtime.autocast():
            module.forward(*self._batch(size))  # which is not compiled: that would not see the hooks
        weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)

    def _batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Token ids and targets, all 0."""
        ids = torch.zeros(size, self.seq_len, dtype=torch.int64, device=self.world.device)
        return ids, ids.clone()


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: what the machine has, and what its own limit and its groups' leave it."""
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
            if group.is_relative_to(top):  # a container may see its own group as the top one
                rooms += _group_room(group, *names)
    return max(0, min(rooms, default=os.sysconf("SC_PHYS_PAGES") * page))


def _group_room(group: Path, limit: str, used: str, cache: str) -> list[int]:
    """Bytes that a control group may still take, its cache of files counted as free; nothing where it has no limit."""
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        stat = dict(line.split() for line in _lines(group / "memory.stat"))
        room = int((group / limit).read_text()) - int((group / used).read_text()) + int(stat.get(cache, 0))
        return [room]
    return []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
