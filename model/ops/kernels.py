"""The choice of an operator's form: which implementation runs.

On GPUs "auto" means an operator's kernels, unless a process uses none: with runtime.kernels=false,
or when its proof finds its numbers wrong (runtime/proof.py).
"""

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from common.console import say_once
from model.ops.custom import assume_constant_result

enabled = True
"""Whether this process uses kernels. The choice is constant in compiled code."""

WhyNot = Callable[..., str | None]
"""Returns why a device cannot run the kernels, or None if it can.

It takes the type and the index of the device, and the type and the last dimension of the operator's
first input.
"""


@assume_constant_result
def why_not_triton(
    device: str, index: int | None, dtype: torch.dtype | None = None, *_: Any
) -> str | None:
    """Return why no Triton kernel can run on a device, or None if they can."""
    if find_spec("triton") is None:
        return "needs the package triton, which is not installed: pip install triton"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device != "cuda":
        return f"needs an NVIDIA GPU, and the tensors are on {device}"
    gpu = torch.cuda.get_device_properties(index)
    if gpu.major < 8:
        return f"needs a GPU of compute capability 8.0, and {gpu.name} has {gpu.major}.{gpu.minor}"
    if dtype == torch.float64:  # one kernel would compile for half a minute
        return "needs a smaller type than float64"
    return None


def choose_form(
    operator: str, plain: str, fast: str, x: Tensor, why_not: WhyNot = why_not_triton
) -> str:
    """Return the form to run on this device.

    Args:
        operator: its name in messages.
        plain: the form that takes anything.
        fast: the form that has kernels for GPUs.
        x: the operator's first input.
        why_not: for the kernels.
    """
    facts = x.device.type, x.device.index, x.dtype, x.shape[-1]
    return _choose(operator, plain, fast, why_not, *facts)


def choose_backend(
    operator: str,
    backend: str,
    backends: Sequence[str],
    x: Tensor,
    why_not: WhyNot = why_not_triton,
) -> str:
    """Return `backend`, or for "auto" the fastest one on this device: "chunked" or "triton".

    Raises:
        ValueError: the backend is not one of `backends`, or does not run here.
    """
    if backend == "auto":
        return choose_form(operator, "chunked", "triton", x, why_not)
    reason = None
    if backend not in backends:
        reason = f"does not exist: choose one of auto, {', '.join(backends)}"
    elif backend == "triton":
        reason = why_not(x.device.type, x.device.index, x.dtype, x.shape[-1])
    if reason is not None:
        raise ValueError(f"backend={backend!r} {reason}; backend='chunked' runs everywhere")
    return backend


def has_kernels(device: str) -> bool:
    """Whether kernels may be chosen on this type of device."""
    return device == "cuda"


@assume_constant_result
def _choose(
    operator: str,
    plain: str,
    fast: str,
    why_not: WhyNot,
    device: str,
    index: int | None,
    dtype: torch.dtype,
    size: int,
) -> str:
    """Choose a form. On a GPU, say the choice once."""
    if not enabled or not has_kernels(device) or dtype == torch.float64:
        return plain
    reason = why_not(device, index, dtype, size)
    if reason is not None:
        say_once(f"{operator} uses {plain}, which is slower: {fast} {reason}")
        return plain
    say_once(f"{operator} uses {fast}")
    return fast
