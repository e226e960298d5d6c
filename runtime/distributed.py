"""Several processes that train as one."""

import contextlib
import gc
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from common import exits
from common.commit import code_digest
from common.console import console, errors, print_error
from common.exits import AGAIN, end_process_at_once
from common.settings import JsonDict, UserError, find_differences

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# In an error of gloo or NCCL, this says that another process is gone or does not answer: the file
# of gloo that handles a connection, and NCCL's words. Other errors are this process's own.
_LOST_BY_GLOO = re.compile(r"/gloo/transport/\S*(pair|buffer)\.cc")
_LOST_BY_NCCL = re.compile(
    "ncclRemoteError|remote process exited|was aborted|[Tt]imeout|Timed out"
    "|Connection (closed|reset|refused)|Broken pipe"
)

LAUNCHED_HERE = "this-machine"
"""TORCHELASTIC_RUN_ID of processes that runtime/launch.py started."""
_SECONDS_FOR_PARENT = 2.0
"""How long a process that lost another one leaves it to their parent to see which, and why."""

_DEFAULT_TIMEOUT = timedelta(minutes=30)
"""torch's own."""
_KEEP_STORE = timedelta(seconds=5)
"""How long a process that hosts the store stays for the others, at most."""
_ANSWER_SECONDS = 2.0
"""How long the store has to answer a process that ends."""
_LATE_SECONDS = 30.0
"""How long a process waits for the others at the start before it says so."""


@dataclass(frozen=True)
class World:
    """The processes that train together, seen from this one. Alone, it is a world of size 1."""

    device: torch.device
    rank: int = 0
    size: int = 1
    timeout: timedelta = _DEFAULT_TIMEOUT
    """How long an operation may wait for the others."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints messages."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Add up `value` over all processes, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def gather(self, value: Tensor) -> list[Tensor]:
        """Every process's `value`, by rank, on all of them; all have the same shape and dtype."""
        if self.size == 1:
            return [value]
        value = value.contiguous()
        values = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(values, value)
        return values

    def exchange(self, value: Any) -> list[Any]:
        """The values of all processes, which JSON can hold, by rank. All must call this."""
        if not dist.is_initialized():
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [int(n) for n in self.gather(torch.tensor([len(text)], device=self.device))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: len(text)] = text
        texts = zip(self.gather(padded), lengths, strict=True)
        return [json.loads(bytes(text[:length].tolist())) for text, length in texts]

    def check_equal(self, values: JsonDict) -> None:
        """Raise UserError in all processes if these values differ. Every process must call this."""
        _refuse_differences(self.exchange(values))

    def wait_for_all(self) -> None:
        """Return once every process has called this."""
        if self.size > 1:
            dist.barrier()

    def wrap(
        self, module: nn.Module, fsdp: bool = False, dtype: torch.dtype = torch.float32
    ) -> nn.Module:
        """Move the module to this process's device, and average its gradients over all processes.

        Args:
            module: on the CPU, with the same weights in every process; its attribute `gpt` is the
                model. With fsdp it may be on the meta device, and stays there.
            fsdp: every process holds a shard of every parameter, and not the whole model:
                parameters become DTensors in place, so build the optimizer afterwards. A device
                holds at most one whole block and the embeddings at a time.
            dtype: the runtime's. With bfloat16, FSDP gathers block matrices in bfloat16, so
                autocast casts nothing and results equal DDP's. Parameters and sums of gradients
                stay float32.

        Raises:
            UserError: `fsdp`, and no launcher started this process.
        """
        if fsdp:
            self._shard(module, dtype)
            return module
        module.to(self.device)
        if self.size == 1:
            return module
        # Gradients as views of what is sent are not copied back after they are averaged.
        return DistributedDataParallel(module, gradient_as_bucket_view=True)

    def _shard(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Shard the parameters of module.gpt, block by block."""
        if not dist.is_initialized():
            raise UserError(
                "runtime.strategy=fsdp needs several processes: start them with torchrun "
                "--standalone --nproc_per_node=2 instead of python, or use runtime.strategy=ddp"
            )
        from torch.distributed.fsdp import (
            MixedPrecisionPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )

        gpt: Any = module.gpt
        mesh = init_device_mesh(self.device.type, (self.size,))
        # By default, the root's parameters stay whole after a forward pass, even one without a
        # backward pass: a checkpoint after an evaluation would not hold the parameters that the
        # optimizer updates.
        shard = partial(fully_shard, mesh=mesh, reshard_after_forward=True)
        # The root has what autocast computes with in float32: embeddings, and the few other
        # parameters of blocks.
        matrices = {m.weight for m in gpt.blocks.modules() if isinstance(m, nn.Linear)}
        shard(gpt, ignored_params=matrices)
        sum_dtype = torch.promote_types(dtype, torch.float32)
        policy = MixedPrecisionPolicy(dtype, sum_dtype, cast_forward_inputs=False)
        for block in gpt.blocks:
            shard(block, ignored_params=set(block.parameters()) - matrices, mp_policy=policy)
        # Methods that are called besides forward().
        for method in ("summed_loss", "token_losses"):
            register_fsdp_forward_method(gpt, method)

    def sync_gradients(self, module: nn.Module, now: bool) -> AbstractContextManager[None]:
        """Average gradients in the backward passes inside (`now`), or leave it to a later one.

        So gradients are sent once a step. Until then, every process holds whole gradients, also
        with fsdp. In a step of a single micro-batch, fsdp shards them block by block.
        """
        if isinstance(module, DistributedDataParallel):
            return contextlib.nullcontext() if now else module.no_sync()
        gpt: Any = getattr(module, "gpt", None)
        if hasattr(gpt, "set_requires_gradient_sync"):  # fsdp
            gpt.set_requires_gradient_sync(now)
        return contextlib.nullcontext()

    def unshard(self, tensor: Tensor) -> Tensor:
        """The whole of a sharded tensor; others are returned unchanged. All must call this."""
        return tensor.full_tensor().detach() if _is_sharded(tensor) else tensor

    def local(self, tensor: Tensor) -> Tensor:
        """This process's rows of a sharded tensor, as a view; others are returned unchanged."""
        return tensor.to_local().detach() if _is_sharded(tensor) else tensor

    def rows(self, tensors: Mapping[str, Tensor]) -> dict[str, slice]:
        """The rows of each sharded tensor that this process holds. Those of rank 0 are first."""
        rows = {}
        for name, tensor in tensors.items():
            if _is_sharded(tensor):
                chunk = tensor.__create_chunk_list__()[0]
                rows[name] = slice(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
        return rows

    def shard_like(self, full: Tensor, param: Tensor) -> Tensor:
        """This process's shard of `full`, with the sharding, device and dtype of `param`.

        Sends nothing. If `param` is not sharded, the tensor is only moved to its device.
        """
        if not _is_sharded(param):
            return full.to(param.device)
        from torch.distributed.tensor import distribute_tensor

        full = full.to(param.device, param.dtype)
        return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)


def _is_sharded(tensor: Any) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor. Importing that class takes a second, and only fsdp needs it."""
    return hasattr(tensor, "full_tensor")


class SequenceGroup:
    """Consecutive ranks that share each sequence: the first has its beginning, the last its end.

    `size` is their number, and `place` this process's place among them, from 0. The world has
    `count` such groups, and this one is number `index`. Every process must make its group.
    """

    def __init__(self, world: World, size: int) -> None:
        self.size = size
        self.place = world.rank % size
        self.count = world.size // size
        self.index = world.rank // size
        self._world = world
        self._group = dist.new_group(timeout=world.timeout) if size > 1 else None
        self._sending: list[tuple[Any, Tensor]] = []

    def send(self, tensor: Tensor, steps: int) -> None:
        """Send a tensor to the process so many `steps` ahead, without waiting for it."""
        self._sending = [(work, sent) for work, sent in self._sending if not work.is_completed()]
        tensor = tensor.detach().to(self._world.device).contiguous()
        work = dist.isend(tensor, self._world.rank + steps, self._group)
        self._sending.append((work, tensor))

    def receive(self, like: Tensor, steps: int) -> Tensor:
        """Wait for a tensor of the shape and type of `like` from the process `steps` ahead."""
        device = self._world.device
        received = torch.empty_like(like, device=device, memory_format=torch.contiguous_format)
        dist.recv(received, self._world.rank + steps, self._group)
        return received


@contextlib.contextmanager
def join_world(device: torch.device, timeout: timedelta = _DEFAULT_TIMEOUT) -> Iterator[World]:
    """Join the processes that torchrun (or srun) started beside this one. Only rank 0 prints.

    Args:
        timeout: how long an operation may wait for the other processes.

    Raises:
        UserError: the launcher's variables are not complete, there is no GPU for this process, or
            processes differ in code, torch or kind of device.
        SystemExit: another process is gone or does not answer; one line says so. Status AGAIN: only
            the steps since the last checkpoint are lost. Status 1: the other process has printed an
            error that a person must fix.
    """
    if "RANK" not in os.environ and os.environ.get("WORLD_SIZE", "1") == "1":
        yield World(device)
        return
    rank, size = _read_environment()
    device = _device_of_rank(device)
    console.quiet = rank != 0
    store: dist.Store | None = None
    abort = False
    try:
        # Meet the others, and train in their world.
        store = _connect(rank, size, timeout)
        _form_group(store, device, rank, size, timeout)
        yield World(device, rank, size, timeout)
    except BaseException as error:
        # The frames hold the module, which must be gone before the group.
        _forget_frames(error)
        stops_on_request = isinstance(error, SystemExit) and error.code in (None, 0, AGAIN)
        abort = device.type == "cuda" and not stops_on_request
        if _is_lost_peer(error):
            _end_after_loss(error, store, rank)
        # Tell the others, which lose this process now, that a person must see its message.
        if store is not None and not stops_on_request:
            with contextlib.suppress(RuntimeError):  # it has ended with its process
                store.set("failed", str(rank))
        raise
    finally:
        _leave_group(abort)
        if store is not None:
            _leave_store(store, rank, size)


def _form_group(
    store: dist.Store, device: torch.device, rank: int, size: int, timeout: timedelta
) -> None:
    # Compared first, because processes that differ may be unable to form a group.
    versions = {"code": code_digest(), "torch": torch.__version__, "device": device.type}
    store.set(f"versions/{rank}", json.dumps(versions))
    _refuse_differences([json.loads(store.get(f"versions/{index}")) for index in range(size)])
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )


def is_launched_here() -> bool:
    """Whether runtime/launch.py started this process: its parent speaks of signals and losses."""
    return os.environ.get("TORCHELASTIC_RUN_ID") == LAUNCHED_HERE


def _end_after_loss(error: BaseException, store: dist.Store | None, rank: int) -> NoReturn:
    """Say why another process is lost, and raise SystemExit."""
    exits.lost_process = True
    if is_launched_here():
        time.sleep(_SECONDS_FOR_PARENT)
        sys.stdout.flush()
        os._exit(AGAIN)
    # Without torch's file names and advice.
    reason = re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
    line = f"rank {rank} lost contact with another process ({reason}): start the same command again"
    # The store of a process that is suspended never answers.
    in_vain = threading.Timer(_ANSWER_SECONDS, end_process_at_once, (AGAIN, line))
    in_vain.start()
    status = AGAIN
    with contextlib.suppress(RuntimeError):  # the store has ended with its process
        if store is not None and store.check(["failed"]):
            failed = int(store.get("failed"))
            line = f"process {rank} stops: process {failed} ended with an error, see its message"
            status = 1
    in_vain.cancel()
    print_error(line)
    raise SystemExit(status) from None


def _leave_group(abort: bool) -> None:
    # DDP's reducer must be gone before the group. If it held the last reference to the group, it
    # would join gloo's threads while it holds the interpreter's lock, and one of them may need that
    # lock to release a tensor. And its connections would stay open: the others would not notice
    # that this process is gone.
    gc.collect()
    # No variable may hold the group: destroyed, it would still not close its connections.
    if abort and dist.group.WORLD is not None:
        # NCCL would wait for its operations, which the others may never begin.
        dist.group.WORLD.abort()
    elif dist.is_initialized():
        dist.destroy_process_group()


def _hosts_store(rank: int) -> bool:
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _leave_store(store: dist.Store, rank: int, size: int) -> None:
    """Say that this process is done. Its host waits for the others, as long as _KEEP_STORE."""
    with contextlib.suppress(RuntimeError):  # the store has ended, or a process is lost or late
        store.set(f"done/{rank}", "")
        if _hosts_store(rank):
            store.wait([f"done/{index}" for index in range(size)], _KEEP_STORE)


def _refuse_differences(values: list[JsonDict]) -> None:
    """Raise UserError if a process has other values than process 0."""
    for rank, rank_values in enumerate(values):
        differing = find_differences(values[0], rank_values)
        if differing:
            listed = ", ".join(
                f"{key}={value} (process 0: {main})" for key, (main, value) in differing.items()
            )
            raise UserError(
                f"process {rank} differs from process 0 in {listed}: start the same command with "
                "the same code and data in every process"
            )


def _read_environment() -> tuple[int, int]:
    """RANK and WORLD_SIZE, after checking that all variables of a process group are set."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise UserError(
            f"several processes need {', '.join(needed)}, and {', '.join(missing)} is not set: "
            "start with torchrun or scripts/slurm/train.sbatch, or set none of them"
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _device_of_rank(device: torch.device) -> torch.device:
    """The CPU, or the GPU of this machine that belongs to this process."""
    if device.type != "cuda":
        return device
    n_gpus = torch.cuda.device_count()
    # Some launchers show each process only its own GPU.
    index = 0 if n_gpus == 1 else int(os.environ.get("LOCAL_RANK", "0"))
    if index >= n_gpus:
        raise UserError(
            f"LOCAL_RANK={index}, but torch sees {n_gpus} GPUs here: start one process for each GPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _connect(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Connect to the store where processes find each other. Rank 0 hosts it, unless torchrun does.

    torchrun's store outlives the processes that it restarts. Every attempt has its own prefix, so
    that it does not find values (such as addresses) of an earlier one, as it would with torch's own
    rendezvous.
    """
    hosts_store = _hosts_store(rank)
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    line = f"waiting for the others of {size} processes at MASTER_ADDR={host} MASTER_PORT={port}"
    late = threading.Timer(_LATE_SECONDS, errors.print, (line,))
    late.start()
    try:
        store = dist.TCPStore(
            host, port, size, is_master=hosts_store, timeout=timeout, multi_tenant=hosts_store
        )
    except dist.DistNetworkError as error:
        if hosts_store and "EADDRINUSE" in str(error):
            raise UserError(
                f"MASTER_PORT={port} is in use on {host}: set another for all processes"
            ) from None
        raise
    finally:
        late.cancel()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return dist.PrefixStore(f"{size} processes, attempt {attempt}", store)


def _is_lost_peer(error: BaseException) -> bool:
    """Whether the error means that another process is gone or cannot be reached."""
    if isinstance(error, dist.DistBackendError):
        return _LOST_BY_NCCL.search(str(error)) is not None
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _LOST_BY_GLOO.search(str(error)) is not None


def _forget_frames(error: BaseException | None) -> None:
    """Release the local variables in the tracebacks of an error and of its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
