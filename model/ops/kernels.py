"""Where Triton kernels can run, and the choice between them and plain torch."""

import os
from collections.abc import Callable, Iterable
from importlib.util import find_spec

import torch
from torch import Tensor

from common.console import say_once
from model.ops.compiling import assume_constant_result

Check = Callable[..., None]


def choose_backend(
    operator: str, find_check: Callable[[], Check], backend: str, backends: Iterable[str], x: Tensor
) -> str:
    """Return the backend to use: `backend` itself, or for "auto" "triton" on GPUs where it is right, else "chunked".

    Args:
        operator: name for messages.
        find_check: imports and returns a check of a device and the name of a dtype; called for "auto" on GPUs.
        backends: all that exist.
        x: has the device and the dtype of the operator's inputs.

    Raises:
        ValueError: the backend does not exist, or not on this device.
    """
    device = x.device
    if backend == "auto":
        return _fastest_on_gpu(operator, find_check, device.index, x.dtype) if device.type == "cuda" else "chunked"
    if backend not in backends:
        raise ValueError(f"backend={backend!r} does not exist: choose one of auto, {', '.join(backends)}")
    if backend == "triton" and (why_not := why_not_triton(device.type, device.index)):
        raise ValueError(f"backend='triton' {why_not}; backend='chunked' takes anything")
    return backend


@assume_constant_result
def _fastest_on_gpu(operator: str, find_check: Callable[[], Check], index: int | None, dtype: torch.dtype) -> str:
    """Choose the backend of an operator, and log the choice once."""
    why_not = why_not_triton("cuda", index)
    if why_not is None:
        from model.ops.checks import failed_check  # only GPUs need it

        name = str(dtype).removeprefix("torch.")
        why_not = failed_check(f"the Triton kernel of {operator}", find_check(), f"cuda:{index}", dtype=name)
    if why_not:
        say_once(f"{operator} uses plain torch, which is slower: backend='triton' {why_not}")
        return "chunked"
    say_once(f"{operator} uses a Triton kernel")
    return "triton"


@assume_constant_result
def why_not_triton(device: str, index: int | None) -> str | None:
    """Return why no Triton kernel can run on a device, or None if they can."""
    if find_spec("triton") is None:
        return "needs the package triton, which is not installed: pip install triton"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device != "cuda":
        return f"needs an NVIDIA GPU (or TRITON_INTERPRET=1, for tests), and the tensors are on {device}"
    gpu = torch.cuda.get_device_properties(index)
    if gpu.major < 8:
        return f"needs a GPU of compute capability 8.0, and {gpu.name} has {gpu.major}.{gpu.minor}"
    return None
