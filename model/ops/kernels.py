"""The choice of an operator's form: which implementation runs. GPUs run kernels that pass their check (checks.py)."""

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from common.console import say_once
from model.ops.checks import failed_check
from model.ops.custom import assume_constant_result

WhyNot = Callable[..., str | None]
"""Returns why a device cannot run the kernels, or None if it can.

It takes the type and the index of the device, and the type and the last dimension of the operator's first input.
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
        return f"needs an NVIDIA GPU (or TRITON_INTERPRET=1, for tests), and the tensors are on {device}"
    gpu = torch.cuda.get_device_properties(index)
    if gpu.major < 8:
        return f"needs a GPU of compute capability 8.0, and {gpu.name} has {gpu.major}.{gpu.minor}"
    if dtype == torch.float64:  # one kernel would compile for half a minute
        return "needs a smaller type than float64"
    return None


def choose_form(
    operator: str,
    backend: str,
    forms: Sequence[str],
    find_check: Callable[..., Any],
    *inputs: Tensor,
    why_not: WhyNot = why_not_triton,
) -> str:
    """Return the form to run: `backend` itself, or for "auto" the fastest one that is right on this device.

    Args:
        operator: name for messages.
        forms: all that exist. The last one has kernels for GPUs, and the one before it takes anything.
        find_check: for "auto" on GPUs: given types and last dimensions of the inputs, it imports a check and returns it
            with its arguments.
        inputs: of the operator.
        why_not: for the kernels.

    Raises:
        ValueError: the backend does not exist, or not on this device.
    """
    device, facts = inputs[0].device, [(x.dtype, x.shape[-1]) for x in inputs]
    *_, plain, fast = forms
    if backend == "auto":
        on_gpu = device.type == "cuda"
        return (
            _fastest_on_gpu(operator, plain, fast, find_check, why_not, device.index, *facts)
            if on_gpu
            else plain
        )
    if backend not in forms:
        raise ValueError(
            f"backend={backend!r} does not exist: choose one of auto, {', '.join(forms)}"
        )
    if backend == fast and (reason := why_not(device.type, device.index, *facts[0])):
        raise ValueError(
            f"backend={backend!r} {reason}; use backend={plain!r}, which runs everywhere"
        )
    return backend


@assume_constant_result
def _fastest_on_gpu(
    operator: str,
    plain: str,
    fast: str,
    find_check: Callable[..., Any],
    why_not: WhyNot,
    index: int | None,
    *facts: tuple[torch.dtype, int],
) -> str:
    """Choose the form of an operator, and log the choice once."""
    reason = why_not("cuda", index, *facts[0])
    if reason is None:
        dtypes, sizes = zip(*facts, strict=True)
        check, arguments = find_check(
            tuple(str(dtype).removeprefix("torch.") for dtype in dtypes), sizes
        )
        reason = failed_check(f"{operator} by {fast}", check, f"cuda:{index}", **arguments)
    if reason:
        say_once(f"{operator} uses {plain}, which is slower: {fast} {reason}")
    else:
        say_once(f"{operator} uses {fast}")
    return plain if reason else fast
