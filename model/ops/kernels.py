"""Where Triton kernels can run, and the choice between them and plain torch."""

import os
from collections.abc import Callable, Hashable, Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from common.console import say_once
from model.ops.compiling import assume_constant_result

FindCheck = Callable[[tuple[str, ...], tuple[int, ...]], tuple[Callable[..., None], dict[str, Hashable]]]
"""Imports a check and returns it with its arguments, given types and last dimensions of an operator's inputs."""
WhyNot = Callable[..., str | None]
"""Takes the type and the index of a device, and the type and the last dimension of an operator's first input."""


@assume_constant_result
def why_not_triton(device: str, index: int | None, *_: Any) -> str | None:
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


def choose_backend(
    operator: str,
    find_check: FindCheck,
    backend: str,
    backends: Iterable[str],
    *given: Tensor,
    why_not: WhyNot = why_not_triton,
) -> str:
    """Return the backend to use: `backend` itself, or for "auto" "triton" on GPUs where it is right, else "chunked".

    Args:
        operator: name for messages.
        find_check: called for "auto" on GPUs.
        backends: all that exist.
        given: inputs of the operator.
        why_not: returns why "triton" cannot run, or None if it can.

    Raises:
        ValueError: the backend does not exist, or not on this device.
    """
    device, facts = given[0].device, [(x.dtype, x.shape[-1]) for x in given]
    if backend == "auto":
        on_gpu = device.type == "cuda"
        return _fastest_on_gpu(operator, find_check, why_not, device.index, *facts) if on_gpu else "chunked"
    if backend not in backends:
        raise ValueError(f"backend={backend!r} does not exist: choose one of auto, {', '.join(backends)}")
    if backend == "triton" and (reason := why_not(device.type, device.index, *facts[0])):
        raise ValueError(f"backend='triton' {reason}; backend='chunked' takes anything")
    return backend


@assume_constant_result
def _fastest_on_gpu(
    operator: str, find_check: FindCheck, why_not: WhyNot, index: int | None, *facts: tuple[torch.dtype, int]
) -> str:
    """Choose the backend of an operator, and log the choice once."""
    reason = why_not("cuda", index, *facts[0])
    if reason is None:
        from model.ops.checks import failed_check  # only GPUs need it

        dtypes, sizes = zip(*facts, strict=True)
        check, arguments = find_check(tuple(str(dtype).removeprefix("torch.") for dtype in dtypes), sizes)
        reason = failed_check(f"the Triton kernels of {operator}", check, f"cuda:{index}", **arguments)
    if reason:
        say_once(f"{operator} uses plain torch, which is slower: backend='triton' {reason}")
        return "chunked"
    say_once(f"{operator} uses Triton kernels")
    return "triton"
