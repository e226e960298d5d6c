"""The device and the dtype that a model runs on. Every automatic choice prints what it chose, once."""

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from common.console import say_once
from common.settings import Settings, UserError
from model.gpt import Recompute
from trainer.devices import device_of_gpu


class DeviceConfig(Settings, defaults="device"):
    """Device and dtype, for everything that runs a model."""

    device: Literal["auto", "cpu", "cuda"]
    """auto: a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"]
    """bfloat16 is autocast with float32 weights; auto: bfloat16 on GPUs that support it, else float32."""


class RuntimeConfig(DeviceConfig, defaults="runtime/auto"):
    """Device, dtype, and how a step runs."""

    compile: Literal["auto"] | bool
    """torch.compile; auto: on GPUs."""
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"]
    """Most sequences per forward pass of a process; gradients are accumulated up to the global batch.
    auto: as many as fit in memory."""
    strategy: Literal["ddp", "fsdp"]
    """ddp: every process holds the whole model; fsdp: each holds a part, for models too large for one GPU."""
    recompute: Recompute
    """Activations that the backward pass computes again instead of keeping them. block: all but the inputs of blocks;
    selective: all but these and blocks' products with weights."""
    on_nonfinite: Literal["halt", "skip", "rollback"]
    """When loss or gradient is not finite, or the loss spikes. halt: stop; skip: skip the batch; rollback: return to
    the last checkpoint, and skip the batch when it is reached again."""
    max_bad_steps: int = Field(ge=0)
    """Most steps in a row that are skipped; one more stops the run."""
    spike_sigmas: float | None = Field(gt=0, allow_inf_nan=False)
    """A loss this many standard deviations above the mean of about the last 100 counts as bad; null: never."""
    hang_seconds: float | None = Field(gt=0, allow_inf_nan=False)
    """If one of several processes makes no progress for this long, all processes stop with an error that names it;
    null: they wait forever."""


@dataclass(frozen=True)
class Runtime:
    """The chosen device and dtype."""

    device: torch.device
    dtype: torch.dtype

    def announce(self) -> None:
        """Print the choice."""
        say_once(f"running on {device_name(self.device)} in {str(self.dtype).removeprefix('torch.')}")

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype of the weights: bfloat16 is used for matrix products only."""
        return torch.float32 if self.dtype == torch.bfloat16 else self.dtype

    def autocast(self) -> AbstractContextManager[None]:
        """A context manager for forward passes: autocast if the dtype is bfloat16, else no-op."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)


def open_runtime(config: DeviceConfig) -> Runtime:
    """Choose device and dtype, and make torch deterministic.

    Raises:
        UserError: runtime.device is cuda, but torch sees no GPU.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("runtime.device=cuda, but torch sees no GPU here: use runtime.device=cpu or auto")
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    if config.dtype == "auto":
        name = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    else:
        name = config.dtype
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # for debugging; slow
    torch.set_float32_matmul_precision("high")
    return Runtime(device, getattr(torch, name))


def maybe_compile(modules: Iterable[nn.Module], config: RuntimeConfig, device: torch.device) -> None:
    """Compile the modules in place, if the configuration or the device requires it."""
    wanted = device.type == "cuda" if config.compile == "auto" else config.compile
    if not wanted:
        why = "compiling takes longer than it saves on a CPU" if config.compile == "auto" else "runtime.compile=false"
        say_once(f"not compiled: {why}")
        return
    if device.type == "cuda" and find_spec("triton") is None:
        say_once("not compiled: torch.compile needs the package triton on a GPU")
        return
    for module in modules:
        module.compile()


def device_name(device: torch.device) -> str:
    """The name that the device reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"the CPU with {torch.get_num_threads()} threads"


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's peak in matrix products of this dtype, FLOP/s; None if unknown."""
    known = device_of_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known.peak(dtype) if known else None
