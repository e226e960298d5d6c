"""The device and the dtype that a model runs on. Every automatic choice is said once."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from common.commit import code_digest
from common.console import count
from common.settings import Settings, UserError
from model.gpt import GPT
from model.layers import Recompute
from model.ops import kernels
from runtime.gpus import device_of_gpu


class DeviceConfig(Settings, defaults="device"):
    """Device and dtype, for everything that runs a model."""

    device: Literal["auto", "cpu", "cuda"]
    """auto: a GPU if there is one; an error if there is one that torch does not see."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"]
    """bfloat16 is autocast with float32 weights; auto: bfloat16 on GPUs that compute in it and on
    CPUs with AMX, else float32."""
    deterministic: Literal["auto"] | bool
    """Whether operations give the same bits in every run, as far as torch can; auto: on CPUs. It is
    slower on GPUs, where it also turns off padding and autotuning in compiled code."""
    kernels: bool
    """Use our own GPU kernels; false: plain torch."""
    proof: bool
    """On a GPU, compare the first gradient, or a text's logits, with plain torch, and use that if
    they are wrong. The outcome is kept for this GPU, model, torch and Triton."""


class ProcessesConfig(DeviceConfig, defaults="processes"):
    """Device, dtype, and how many processes of this machine share the work."""

    processes: Literal["auto"] | Annotated[int, Field(ge=1)]
    """auto: on a CPU, one process of one thread for each core, where that is faster than threads
    (docs/training.md). 1: one process with threads. N: so many, on GPUs one each. Processes of
    torchrun or another launcher start none."""


class RuntimeConfig(ProcessesConfig, defaults="runtime/auto"):
    """Device, dtype, and how a step runs."""

    compile: Literal["auto"] | bool
    """torch.compile of each block; auto: on GPUs."""
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"]
    """Most sequences per forward pass of a process; gradients are accumulated up to the global
    batch. auto: the fewest equal micro-batches that fit in a GPU's memory, or 8 where processes
    wait for each other (fsdp, context_parallel) and on CPUs."""
    strategy: Literal["ddp", "fsdp"]
    """ddp: every process holds the whole model; fsdp: each holds a shard, for models too large for
    one GPU."""
    context_parallel: int = Field(ge=1)
    """Processes that share each sequence, a chunk for each; 1: each process has whole sequences."""
    sequence_chunk: int | None = Field(ge=1)
    """Tokens of a sequence that go through the model at once. Longer sequences take several passes,
    forwards and backwards, which carry the state: the gradient stays exact. Only for models whose
    state has one size. null: all."""
    recompute: Recompute
    """Activations that the backward pass computes again instead of keeping them. block: all but the
    inputs of blocks; selective: all but these and blocks' products with weights."""
    on_nonfinite: Literal["halt", "skip"]
    """When loss or gradient is not finite. halt: stop; skip: leave the weights as they are and
    continue with the next batch."""
    max_bad_steps: int = Field(ge=0)
    """Most steps in a row that are skipped; one more stops the run."""
    timeout_minutes: float = Field(gt=0, le=10_000)
    """How long a process waits for the others before it ends with status 75. Set it above the time
    of the slowest start or save."""

    def micro_batch_on(self, device: torch.device) -> int | None:
        """The size of micro-batches; None: sizes are to be tried."""
        if self.micro_batch != "auto":
            return self.micro_batch
        has_to_wait = self.strategy == "fsdp" or self.context_parallel > 1
        return 8 if has_to_wait or device.type == "cpu" else None


@dataclass(frozen=True)
class Compute:
    """The chosen device and dtype, and other settings `runtime.` that a forward pass needs."""

    device: torch.device
    dtype: torch.dtype
    sequence_chunk: int | None = None
    """That of RuntimeConfig."""
    proof: bool = False
    """Whether a model must prove its numbers before it is used."""

    def __str__(self) -> str:
        how = "" if torch.are_deterministic_algorithms_enabled() else "; runs differ in rounding"
        return f"{device_name(self.device)} in {str(self.dtype).removeprefix('torch.')}{how}"

    def shared_by(self, processes: int) -> str:
        """Like str(), for so many processes."""
        if processes == 1:
            return str(self)
        if self.device.type != "cpu":
            return f"{processes:,} processes, each on {self}"
        n_threads = torch.get_num_threads()
        each = "one thread" if n_threads == 1 else f"{n_threads} threads"
        shared = f"the CPU: {processes:,} processes of {each},"
        return str(self).replace(device_name(self.device), shared)

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype of the weights: bfloat16 is used for matrix products only."""
        return torch.float32 if self.dtype == torch.bfloat16 else self.dtype

    def autocast(self) -> AbstractContextManager[None]:
        """A context manager for forward passes: autocast if the dtype is bfloat16, else no-op."""
        enabled = self.dtype == torch.bfloat16
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled)


def choose_compute(config: DeviceConfig) -> Compute:
    """Choose device and dtype, and whether torch is deterministic.

    Raises:
        UserError: torch sees no GPU, and runtime.device is cuda, or it is auto and there is one.
    """
    # The device. A GPU that cannot be used is an error: training on the CPU would take days.
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "runtime.device=cuda, but torch sees no GPU here: use runtime.device=cpu or auto"
        )
    why_unseen = why_gpu_is_unseen() if config.device == "auto" else None
    if why_unseen is not None:
        raise UserError(
            f"this machine has a GPU that torch does not see: {why_unseen}; or use "
            "runtime.device=cpu"
        )
    uses_gpu = config.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if uses_gpu else "cpu")
    if device.type == "cpu":
        keep_freed_memory()
    # The dtype.
    name = config.dtype
    if name == "auto":
        name = "bfloat16" if is_bfloat16_fast(device) else "float32"
    # Whether operations give the same bits in every run.
    deterministic = config.deterministic
    if deterministic == "auto":
        deterministic = device.type == "cpu"
    if deterministic:
        # These make cuBLAS and compiled code deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    # torch.use_deterministic_algorithms would import the compiler, which takes seconds.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    # For debugging, and slow.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("high")
    # What else a forward pass needs to know.
    sequence_chunk = config.sequence_chunk if isinstance(config, RuntimeConfig) else None
    kernels.enabled = config.kernels
    proof = config.proof and device.type == "cuda"
    return Compute(device, getattr(torch, name), sequence_chunk, proof)


def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed tensors for new ones.

    Steps are faster and take a tenth more memory. By default glibc returns memory to the system
    many times a step, and every page that is reused causes a page fault.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # other C libraries do not have it
        # M_MMAP_MAX, 0: no tensor has pages of its own, which would be returned with it.
        libc.mallopt(-4, 0)
        # M_TRIM_THRESHOLD, -1: free memory at the end of the heap is never returned.
        libc.mallopt(-1, -1)


def is_bfloat16_fast(device: torch.device) -> bool:
    """Whether `runtime.dtype=auto` is bfloat16 on this machine's GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported()  # AVX512-BF16 alone is not always faster than float32


def why_gpu_is_unseen(dev: Path = Path("/dev")) -> str | None:
    """Return why torch does not see this machine's NVIDIA GPU, and what to do.

    None: torch sees it, or there is none. A GPU that CUDA_VISIBLE_DEVICES hides counts as none.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
    if hidden or not any(dev.glob("nvidia[0-9]*")) or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a build of torch with it"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        cause = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
        remedy = "update the driver or torch, or see what CUDA_VISIBLE_DEVICES and the job allow"
        return f"{cause}, and {built}: {remedy}"
    return "torch.cuda.is_available() is false"


def should_compile(config: RuntimeConfig, compute: Compute) -> bool:
    """Whether blocks are compiled, if the configured form is right."""
    if config.compile == "auto":
        # On a CPU, compiling takes longer than it saves. Processes that share sequences wait for
        # each other in blocks.
        return compute.device.type == "cuda" and config.context_parallel == 1
    return config.compile


def compile_blocks(gpt: GPT, compiled: bool) -> None:
    """Compile each block of a model by itself, so that identical ones share one compilation; or
    undo that."""
    if compiled:
        from torch.compiler import config  # slow to import

        config.cache_key_tag = code_digest(["model"])  # its disk cache may contain older operators
    for block in gpt.blocks:
        block._compiled_call_impl = None
        if compiled:
            block.compile()


def is_compiled(module: nn.Module) -> bool:
    """Whether a module of the model is compiled."""
    return any(child._compiled_call_impl is not None for child in module.modules())


@contextmanager
def not_compiled(module: nn.Module) -> Iterator[None]:
    """Run a module of the model without the compiled code of its blocks. FlexAttention, which is
    compiled by itself, stays so: uncompiled it would compute all T x T scores."""
    compiled = {child: child._compiled_call_impl for child in module.modules()}
    for child in compiled:
        child._compiled_call_impl = None
    try:
        yield
    finally:
        for child, call in compiled.items():
            child._compiled_call_impl = call


def triton_version() -> str | None:
    """The version of Triton, or None if it is not installed."""
    return None if find_spec("triton") is None else version("triton")


def device_name(device: torch.device) -> str:
    """The name that the device reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"the CPU with {count(torch.get_num_threads(), 'thread')}"


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's peak in matrix products of this dtype, FLOP/s; None if unknown."""
    if device.type != "cuda":
        return None
    known = device_of_gpu(torch.cuda.get_device_name(device))
    return known.peak(dtype) if known else None
