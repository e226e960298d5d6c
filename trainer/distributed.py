"""Several processes that train as one. The only file that imports torch.distributed."""

import contextlib
import gc
import json
import os
import re
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from common.commit import code_digest
from common.console import console, errors, print_error
from common.exits import AGAIN
from common.settings import UserError, differences
from trainer.deadline import Deadline

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Found in the messages of gloo's RuntimeErrors when another process is gone or does not answer.
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out",
)
# The same in the messages of NCCL's errors; its other errors are this process's own.
_LOST_BY_NCCL = (
    *_LOST,
    "ncclRemoteError",
    "remote process exited",
    "was aborted",
    "timeout",
    "Timeout",
)

_LEAVE_SECONDS = 20.0
"""How long a failed process waits for the others, who may be inside NCCL, before it aborts NCCL's operations."""
_KEEP_STORE_SECONDS = 3.0
"""How long a process that hosts the store stays for the others, at most."""
_LATE_SECONDS = 30.0
"""How long a process waits for the others before it says so."""
_FOREVER = timedelta(days=20)  # torch counts milliseconds, in part with 32 bits


@dataclass(frozen=True)
class World:
    """The processes that train together, seen from this one. A single process is a world of size 1."""

    device: torch.device
    rank: int = 0
    size: int = 1
    deadline: Deadline | None = field(default=None, repr=False, compare=False)
    timeout: timedelta | None = field(default=None, repr=False, compare=False)
    """How long an operation may wait for the others."""
    store: Any = field(default=None, repr=False, compare=False)
    """A torch.distributed.Store that all processes share."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints messages."""
        return self.rank == 0

    def at(self, place: str) -> None:
        """Note where this process is, such as "step 12: forward 1", in case that it hangs there."""
        if self.deadline is not None:
            self.deadline.at(place)

    def sum(self, value: Tensor) -> Tensor:
        """Add up `value` over all processes, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def gather(self, value: Tensor) -> list[Tensor]:
        """Every process's `value`, by rank, on all of them; all have the same shape and dtype."""
        if self.size == 1:
            return [value]
        values = [
            torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        dist.all_gather(values, value.contiguous())
        return values

    def exchange(self, name: str, value: Any) -> list[Any]:
        """The values of all processes, which JSON can hold, by rank. Every process must call this, once for a name."""
        if self.store is None:  # alone
            return [value]
        self.store.set(f"{name}/{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"{name}/{rank}")) for rank in range(self.size)]

    def check_equal(self, name: str, values: Mapping[str, Any]) -> None:
        """Raise UserError in all processes if these values are not the same in all of them: see `exchange`."""
        first, *others = self.exchange(name, values)
        for rank, found in enumerate(others, start=1):
            if differ := differences(first, found):
                listed = ", ".join(
                    f"{key}={here} (process 0: {there})" for key, (there, here) in differ.items()
                )
                remedy = "start the same command with the same code and data in every process"
                raise UserError(f"process {rank} differs from process 0 in {listed}: {remedy}")

    def wait_for_all(self) -> None:
        """Return once every process has called this."""
        if self.size > 1:
            dist.barrier()

    def leave(self, error: BaseException | None = None) -> None:
        """Let the others continue without this process, which may take any time for its last work.

        No collective operation may follow.

        Args:
            error: the error that ends this process. If the process itself failed, the others are notified now.
        """
        if self.deadline is not None:
            self.deadline.stop(failed=error is not None and _is_own(error))

    def wrap(
        self, module: nn.Module, fsdp: bool = False, dtype: torch.dtype = torch.float32
    ) -> nn.Module:
        """Move the module to this process's device, and average its gradients over all processes.

        Args:
            module: on the CPU, with the same weights in every process; its attribute `gpt` is the model. With fsdp it
                may be on the meta device, and stays there.
            fsdp: every process holds a part of every parameter, and not the whole model: parameters become DTensors in
                place, so build the optimizer afterwards. A device holds at most one whole block and the embeddings at
                a time.
            dtype: the runtime's. With bfloat16, fsdp sends the matrices of blocks in it, and autocast has nothing left
                to cast: results are those of ddp. Parameters and sums of gradients stay float32.

        Raises:
            UserError: `fsdp`, and no launcher started this process.
        """
        if not fsdp:
            module.to(self.device)
            # Gradients as views of what is sent are not copied back after they are averaged.
            return (
                DistributedDataParallel(module, gradient_as_bucket_view=True)
                if self.size > 1
                else module
            )
        if not dist.is_initialized():
            start = "start them with torchrun --standalone --nproc_per_node=2 instead of python"
            raise UserError(
                f"runtime.strategy=fsdp needs several processes: {start}, or use runtime.strategy=ddp"
            )
        from torch.distributed.fsdp import (
            MixedPrecisionPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )

        gpt: Any = module.gpt
        mesh = init_device_mesh(self.device.type, (self.size,))
        # By default, the root's parameters stay whole after a forward pass, even one without a backward pass:
        # a checkpoint after an evaluation would not hold the parameters that the optimizer updates.
        shard = partial(fully_shard, mesh=mesh, reshard_after_forward=True)
        # The root has what autocast computes with in float32: embeddings, and the few other parameters of blocks.
        matrices = {
            m.weight for block in gpt.blocks for m in block.modules() if isinstance(m, nn.Linear)
        }
        shard(gpt, ignored_params=matrices)
        policy = MixedPrecisionPolicy(
            dtype, torch.promote_types(dtype, torch.float32), cast_forward_inputs=False
        )
        for block in gpt.blocks:
            shard(block, ignored_params=set(block.parameters()) - matrices, mp_policy=policy)
        for method in ("summed_loss", "token_losses"):  # methods called besides forward()
            register_fsdp_forward_method(gpt, method)
        return module

    def sync_gradients(self, module: nn.Module, now: bool) -> AbstractContextManager[None]:
        """Average gradients in the backward passes inside (`now`), or leave that to a later micro-batch.

        So gradients are sent once a step. Until then, every process holds whole gradients, also with fsdp; only in
        steps of a single micro-batch, fsdp shares them block by block.
        """
        if isinstance(module, DistributedDataParallel) and not now:
            return module.no_sync()
        gpt: Any = getattr(module, "gpt", None)
        if hasattr(gpt, "set_requires_gradient_sync"):  # fsdp
            gpt.set_requires_gradient_sync(now)
        return contextlib.nullcontext()

    def unshard(self, tensor: Tensor) -> Tensor:
        """The whole of a sharded tensor; other tensors are returned unchanged. Every process must call this."""
        return tensor.full_tensor().detach() if _is_sharded(tensor) else tensor

    def local(self, tensor: Tensor) -> Tensor:
        """The rows of a sharded tensor that this process holds, as a view; other tensors are returned unchanged."""
        return tensor.to_local().detach() if _is_sharded(tensor) else tensor

    def rows(self, tensors: Mapping[str, Tensor]) -> dict[str, slice]:
        """The rows of each sharded tensor that this process holds. Those of rank 0 are the first."""
        chunks = {n: t.__create_chunk_list__()[0] for n, t in tensors.items() if _is_sharded(t)}
        return {
            name: slice(at.offsets[0], at.offsets[0] + at.sizes[0]) for name, at in chunks.items()
        }

    def shard_like(self, full: Tensor, param: Tensor) -> Tensor:
        """The part of `full` that this process holds of `param`, with its sharding, device and dtype. Sends nothing.

        If `param` is not sharded, the tensor is only moved to its device.
        """
        if not _is_sharded(param):
            return full.to(param.device)
        from torch.distributed.tensor import distribute_tensor

        full = full.to(param.device, param.dtype)
        return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)


def _is_sharded(tensor: Any) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor; to import that class takes a second, which only fsdp needs."""
    return hasattr(tensor, "full_tensor")


class SequenceGroup:
    """Consecutive ranks that share each sequence: the first has its beginning, the last its end.

    `size` is their number, and `place` this process's place among them. The world has `count` such groups, and this one
    is number `index`. Every process must make its group.
    """

    def __init__(self, world: World, size: int) -> None:
        self.size, self.place = size, world.rank % size
        self.count, self.index = world.size // size, world.rank // size
        self._world = world
        self._group = dist.new_group(timeout=world.timeout) if size > 1 else None
        self._sending: list[tuple[Any, Tensor]] = []

    def send(self, tensor: Tensor, steps: int) -> None:
        """Send a tensor to the process that is so many `steps` ahead, without waiting for it."""
        self._sending = [(work, sent) for work, sent in self._sending if not work.is_completed()]
        tensor = tensor.detach().to(self._world.device).contiguous()
        self._sending.append((dist.isend(tensor, self._world.rank + steps, self._group), tensor))

    def receive(self, like: Tensor, steps: int) -> Tensor:
        """Wait for a tensor, of the shape and type of `like`, from the process that is so many `steps` ahead."""
        received = torch.empty_like(
            like, device=self._world.device, memory_format=torch.contiguous_format
        )
        dist.recv(received, self._world.rank + steps, self._group)
        return received


@contextlib.contextmanager
def join_world(device: torch.device, hang_seconds: float | None = None) -> Iterator[World]:
    """Join the processes that torchrun (or srun) started beside this one. Only rank 0 prints.

    Args:
        hang_seconds: this process ends with status AGAIN when the run makes no progress for this long; None: it waits
            forever.

    Raises:
        UserError: the launcher's variables are not complete, there is no GPU for this process, or processes differ in
            code, torch or kind of device.
        SystemExit: another process is gone; one line says why. With status AGAIN, only the steps since the last
            checkpoint are lost; with status 1, the other process has printed an error that a person must fix.
    """
    if "RANK" not in os.environ and os.environ.get("WORLD_SIZE", "1") == "1":
        alone = Deadline(hang_seconds)
        try:
            yield World(device, deadline=alone)
        finally:
            alone.stop()
        return
    rank, size = _read_environment()
    device = _own_device(device)
    console.quiet = rank != 0
    deadline: Deadline | None = None
    abort = False
    hosts_store = (
        rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    )  # else torchrun hosts it
    try:
        # Longer than the deadline, whose message says more.
        timeout = (
            _FOREVER
            if hang_seconds is None
            else timedelta(seconds=2 * hang_seconds + min(10 * hang_seconds, 60))
        )
        how: dict[str, Any] = (
            {"backend": "nccl", "device_id": device}
            if device.type == "cuda"
            else {"backend": "gloo"}
        )
        group_store = _connect(hosts_store, size, timeout)
        # A connection of its own, because the group's may be in use when everything hangs.
        store = dist.PrefixStore(
            "deadline", _connect(False, size, timedelta(seconds=min(hang_seconds or 60, 60)))
        )
        deadline = Deadline(hang_seconds, rank, store)
        world = World(device, rank, size, deadline, timeout, group_store)
        # First, as processes that differ may be unable to form a group.
        world.check_equal(
            "versions", {"code": code_digest(), "torch": torch.__version__, "device": device.type}
        )
        dist.init_process_group(
            store=group_store, rank=rank, world_size=size, timeout=timeout, **how
        )
        yield world
    except BaseException as error:
        abort = device.type == "cuda" and (_is_own(error) or _is_lost_peer(error))
        failed = None if deadline is None else deadline.stop(failed=_is_own(error))
        _forget_frames(error)  # they hold the module: see below
        if not _is_lost_peer(error):
            raise
        why = (
            re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
        )  # no file, no advice
        print_error(
            failed
            or f"rank {rank} lost contact with another process ({why}): start the same command again"
        )
        raise SystemExit(1 if failed else AGAIN) from None
    finally:
        # DDP's reducer must be gone before the group. If it held the last reference to the group, it would join gloo's
        # threads while it holds the interpreter's lock, and one of them may need that lock to release a tensor.
        # And its connections would stay open: the others would not notice that this process is gone.
        gc.collect()
        if deadline is not None:  # without it, there is no group yet
            deadline.stop()
            if abort and dist.group.WORLD is not None:
                deadline.wait_for_others(
                    size, _LEAVE_SECONDS
                )  # an abort would crash them (status 134)
                dist.group.WORLD.abort()  # NCCL would wait for its operations, which the others may never begin
            elif dist.is_initialized():
                dist.destroy_process_group()
            if hosts_store:
                deadline.wait_for_others(size, _KEEP_STORE_SECONDS)


def _read_environment() -> tuple[int, int]:
    """RANK and WORLD_SIZE, after checking that all variables of a process group are set."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        what = f"several processes need {', '.join(needed)}, and {', '.join(missing)} is not set"
        raise UserError(
            f"{what}: start with torchrun or scripts/slurm/train.sbatch, or set none of them"
        )
    size = _number_in_environment("WORLD_SIZE", 2**31)
    return _number_in_environment("RANK", size), size


def _number_in_environment(name: str, below: int) -> int:
    text = os.environ.get(name, "0")
    if not text.isdecimal() or int(text) >= below:
        raise UserError(f"{name}={text} in the environment: give a whole number below {below}")
    return int(text)


def _own_device(device: torch.device) -> torch.device:
    """The CPU, or the GPU of this machine that belongs to this process."""
    if device.type != "cuda":
        return device
    there_are = torch.cuda.device_count()  # 1: some launchers show each process only its own GPU
    index = 0 if there_are == 1 else _number_in_environment("LOCAL_RANK", 2**31)
    if index >= there_are:
        raise UserError(
            f"LOCAL_RANK={index}, but torch sees {there_are} GPUs here: start one process for each GPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _connect(host_it: bool, size: int, timeout: timedelta) -> dist.Store:
    """Connect to the store where processes find each other. Rank 0 hosts it, unless torchrun does.

    torchrun's store outlives the processes that it restarts. Every attempt has its own prefix, so that it does not
    find values (such as addresses) of an earlier one, as it would with torch's own rendezvous.
    """
    host, port = os.environ["MASTER_ADDR"], _number_in_environment("MASTER_PORT", 2**16)
    line = f"waiting for the others of {size} processes at MASTER_ADDR={host} MASTER_PORT={port}"
    late = threading.Timer(_LATE_SECONDS, errors.print, (line,))
    late.start()
    try:
        store = dist.TCPStore(
            host, port, size, is_master=host_it, timeout=timeout, multi_tenant=host_it
        )
    except dist.DistNetworkError as error:
        if host_it and "EADDRINUSE" in str(error):
            raise UserError(
                f"MASTER_PORT={port} is in use on {host}: set another for all processes"
            ) from None
        raise
    finally:
        late.cancel()
    return dist.PrefixStore(
        f"{size} processes, attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store
    )


def _is_lost_peer(error: BaseException) -> bool:
    """Whether the error means that another process is gone or cannot be reached."""
    if isinstance(error, dist.DistError) and not isinstance(error, dist.DistBackendError):
        return True
    lost = _LOST_BY_NCCL if isinstance(error, dist.DistBackendError) else _LOST
    return isinstance(error, RuntimeError) and any(words in str(error) for words in lost)


def _is_own(error: BaseException) -> bool:
    """Whether this process itself has failed and a person must act. Stopping on request is not a failure."""
    asked = isinstance(error, SystemExit) and error.code in (None, 0, AGAIN)
    return not asked and not _is_lost_peer(error)


def _forget_frames(error: BaseException | None) -> None:
    """Release the local variables in the tracebacks of an error and of its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
