"""Where Triton kernels can run, and the choice between them and plain torch."""

import os
from collections.abc import Iterable
from importlib.util import find_spec

import torch

from common.console import say_once


def choose_backend(operator: str, backend: str, backends: Iterable[str], device: torch.device) -> str:
    """Return the backend to use: `backend` itself, or for "auto" "triton" on GPUs that support it, else "chunked".

    Args:
        operator: name for messages.
        backends: all that exist.

    Raises:
        ValueError: the backend does not exist, or not on this device.
    """
    if backend == "auto":
        return _fastest_on_gpu(operator, device.index) if device.type == "cuda" else "chunked"
    if backend not in backends:
        raise ValueError(f"backend={backend!r} does not exist: choose one of auto, {', '.join(backends)}")
    if backend == "triton" and (why_not := why_not_triton(device.type, device.index)):
        raise ValueError(f"backend='triton' {why_not}; backend='chunked' takes anything")
    return backend


@torch.compiler.assume_constant_result
def _fastest_on_gpu(operator: str, index: int | None) -> str:
    """Choose the backend of an operator, and log the choice once."""
    if why_not := why_not_triton("cuda", index):
        say_once(f"{operator} uses plain torch, which is slower: backend='triton' {why_not}")
        return "chunked"
    say_once(f"{operator} uses a Triton kernel")
    return "triton"


@torch.compiler.assume_constant_result
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
