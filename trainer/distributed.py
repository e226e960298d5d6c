"""Several processes as one: the only file that imports torch.distributed."""

import contextlib
import gc
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from common.console import console, errors
from common.exits import AGAIN
from common.settings import UserError
from trainer.watchdog import Notices, Watchdog

Strategy = Literal["ddp", "fsdp"]

# What gloo's errors, plain RuntimeErrors, say when another process is gone or does not answer.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "Timed out")


@dataclass(frozen=True)
class World:
    """This process among those that train together. One process alone is a world of size 1."""

    device: torch.device
    rank: int = 0
    size: int = 1
    watchdog: Watchdog | None = field(default=None, repr=False, compare=False)
    notices: Notices | None = field(default=None, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks to people."""
        return self.rank == 0

    def at(self, place: str) -> None:
        """Note where this process is, such as "step 12: forward 1": what the watchdog says if it gets no further."""
        if self.watchdog is not None:
            self.watchdog.at(place)

    def sum(self, value: Tensor) -> Tensor:
        """The sum of `value` over all processes, on all of them."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def gather(self, value: Tensor) -> list[Tensor]:
        """Every process's `value`, by rank, on all of them; all have the same shape and dtype."""
        if self.size == 1:
            return [value]
        values = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(values, value.contiguous())
        return values

    def wait_for_all(self) -> None:
        """Return once every process has come here."""
        if self.size > 1:
            dist.barrier()

    def leave(self, error: BaseException | None = None) -> None:
        """Meet the others no more: they need not wait for this process, and its own work may take as long as it takes.

        To be called before what only one process does at the end; no collective operation may follow.

        Args:
            error: what ends this process, if it does not end well; the others are told now if it is its own.
        """
        if self.notices is not None and error is not None and _is_own(error):
            self.notices.post()
        if self.watchdog is not None:
            self.watchdog.leave()

    def wrap(self, module: nn.Module, strategy: Strategy = "ddp") -> nn.Module:
        """The module on this process's device, its gradients averaged over all processes.

        Args:
            module: on the CPU, with the same weights in every process; its `gpt` is the model.
            strategy: ddp keeps all of the model in every process; fsdp a part of every parameter, block by block, which
                become DTensors in place: an optimizer is built afterwards. No device ever holds more than one block
                and the embeddings whole.

        Raises:
            UserError: fsdp in a process that no launcher started.
        """
        if strategy == "ddp":
            module.to(self.device)
            return DistributedDataParallel(module) if self.size > 1 else module
        if not dist.is_initialized():
            raise UserError(
                "runtime.strategy=fsdp needs processes to share the model among: start them with "
                "torchrun --standalone --nproc_per_node=2 in place of python, or use runtime.strategy=ddp"
            )
        gpt: Any = module.gpt
        mesh = init_device_mesh(self.device.type, (self.size,))
        for part in [*gpt.blocks, gpt]:
            # The default keeps the root's parameters whole after a forward pass, also one without a backward pass:
            # what is saved after an evaluation would not be what the optimizer knows.
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        for method in ("summed_loss", "token_losses"):  # what is called beside forward()
            register_fsdp_forward_method(gpt, method)
        return module

    def sync_gradients(self, module: nn.Module, now: bool) -> AbstractContextManager[None]:
        """Average gradients in the backward passes inside (`now`), or leave that to a later micro-batch.

        With fsdp they are averaged each time: a gradient that waits would be a whole one, in every process.
        """
        if now or not isinstance(module, DistributedDataParallel):
            return contextlib.nullcontext()
        return module.no_sync()

    def full(self, tensor: Tensor) -> Tensor:
        """All of a tensor that the processes share: every process calls this. Any other tensor is returned as it is."""
        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor

    def like(self, full: Tensor, param: Tensor) -> Tensor:
        """The part of `full` that this process holds of `param`, as `param` is kept: sharding, device and dtype.

        Nothing is sent. Whatever has not the parameter's shape (a step count), and everything where parameters are not
        shared, is only moved to its device.
        """
        if not isinstance(param, DTensor) or full.shape != param.shape:
            return full.to(param.device)
        parts = full.chunk(self.size)  # by rows, as fully_shard does; there may be fewer than processes
        mine = parts[self.rank] if self.rank < len(parts) else full[:0]
        local = mine.to(param.device, param.dtype, copy=True)  # a copy: a view would keep all of `full` in memory
        return DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )


@contextlib.contextmanager
def join_world(device: torch.device, hang_seconds: float | None = None) -> Iterator[World]:
    """Join the processes that torchrun (or srun) started beside this one; alone, do nothing. Only rank 0 prints.

    Args:
        hang_seconds: where a process gets no further for so long, all end; None: they wait for as long as it takes.

    Raises:
        UserError: the launcher's variables are not complete, or there is no GPU for this process.
        SystemExit: another process is gone; said in one line. With AGAIN, nothing is lost but the steps since the
            last checkpoint; with 1, an error has ended it: it has said which, and a person must act.
    """
    if "RANK" not in os.environ and int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield World(device)
        return
    rank, size = _read_environment()
    device = _own_device(device)
    console.quiet = rank != 0
    notices, watchdog, lost, failed = None, None, False, False
    try:
        # The watchdog speaks first: it knows which process the others wait for.
        timeout = timedelta(minutes=30) if hang_seconds is None else timedelta(seconds=2 * hang_seconds + 60)
        store = _connect(rank == 0 and not _store_is_torchruns(), size, timeout)
        if size > 1:
            # A connection of its own: the group's may be in use when all is stuck.
            own = dist.PrefixStore("watchdog", _connect(False, size, timedelta(seconds=hang_seconds or 60)))
            notices = Notices(own, rank, size, _kept_by())
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        if notices is not None and hang_seconds is not None:
            group: Any = dist.group.WORLD
            begun = group._get_sequence_number_for_group
            watchdog = Watchdog(own, rank, size, hang_seconds, begun, _kept_by(), notices)
        yield World(device, rank, size, watchdog, notices)
    except BaseException as error:
        lost, failed = _is_lost_peer(error), _is_own(error)
        _forget_frames(error)  # they hold the module: see below
        if not lost:
            raise
        raise SystemExit(_say_why_lost(rank, error, watchdog, notices)) from None
    finally:
        if failed and notices is not None:
            notices.post()
        # DDP's reducer must be gone before the group. If it were the last to hold the group, it would join gloo's
        # threads while it holds the interpreter's lock, and one of them may need that lock to let go of a tensor.
        # And connections that it holds would not be closed: the others would not notice that this process is gone.
        gc.collect()
        if watchdog is not None:
            watchdog.stop(finished=not lost)
            if not lost and not failed:
                watchdog.let_others_finish()
        if dist.is_initialized():
            dist.destroy_process_group()
        if notices is not None and (failed or notices.failed is not None):
            notices.linger()


def _say_why_lost(rank: int, error: BaseException, watchdog: Watchdog | None, notices: Notices | None) -> int:
    """Say in one line why another process cannot be reached; returns the exit status."""
    if watchdog is not None and watchdog.verdict is not None:  # it has said more than is known here
        return AGAIN
    if notices is not None and notices.look_soon() is not None:
        line, status = notices.line, 1
    else:
        why = re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]  # no file, no advice
        line = f"error: rank {rank} lost contact with another process ({why}): start the same command again"
        status = AGAIN
    errors.print(line, markup=False, style="red")
    return status


def _read_environment() -> tuple[int, int]:
    """RANK and WORLD_SIZE, once all that a group needs is known to be there."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise UserError(
            f"of {', '.join(needed)}, which name the processes of a run, {', '.join(missing)} is not set: start with "
            f"torchrun or scripts/slurm/train.sbatch, or set none of them for one process"
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _own_device(device: torch.device) -> torch.device:
    """The CPU, or the one GPU of this machine that is this process's."""
    if device.type != "cuda":
        return device
    index, there_are = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if there_are == 1:  # a launcher that shows each process only its own
        index = 0
    if index >= there_are:
        raise UserError(
            f"LOCAL_RANK={index}, but torch sees {there_are} GPUs here: start one process for each GPU of a machine"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _connect(keep_it: bool, size: int, timeout: timedelta) -> dist.Store:
    """A connection to the store where processes find each other; rank 0 keeps it, unless torchrun does.

    torchrun's outlives the processes that it starts again. What those before them wrote there, their addresses say,
    must not be found: every attempt has a prefix of its own.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, size, is_master=keep_it, timeout=timeout, multi_tenant=keep_it)
    return dist.PrefixStore(f"{size} processes, attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _store_is_torchruns() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _kept_by() -> str:
    """Who keeps the store."""
    return "torchrun" if _store_is_torchruns() else "rank 0"


def _is_lost_peer(error: BaseException) -> bool:
    """Whether another process is gone, or cannot be reached, rather than something being wrong here."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)
    )


def _is_own(error: BaseException) -> bool:
    """Whether this process has failed, so that a person must act; not if it stops as it was asked to."""
    asked = isinstance(error, SystemExit) and error.code in (None, 0, AGAIN)
    return not asked and not _is_lost_peer(error)


def _forget_frames(error: BaseException | None) -> None:
    """Let go of the variables of the functions that an error, and those that it came of, went through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
