"""What operators and mechanisms of our own need of torch: how it compiles, casts, differentiates,
sums, and aligns.

Autocast does not reach inside custom operators, and their backward passes run outside of it. They
drop forward-mode tangents, and the result of a backward pass without a graph is constant for second
derivatives: torch would take both derivatives to be zero, without an error. The decorators of
torch.compiler would import torch._dynamo, which takes two seconds in every command. On GPUs,
torch.cumsum has other bits every time.
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.nn.functional import pad

from common.numbers import ceil_div

F = TypeVar("F", bound=Callable[..., Any])

CHUNK = 64
"""Tokens of a chunk of attention: C x C scores and d_k x d_v states then cost about the same at
head sizes from 32 to 128."""


def operator(name: str) -> Callable[[F], Any]:
    """Return a decorator: the function becomes an operator that torch.compile leaves whole.

    torch.library.custom_op does this too, but imports torch._dynamo at the first call. The name
    gets a namespace where it is free, because a second operator of the same name would free the
    first one's memory. A process may have this code twice: an exported model, and a copy of it that
    transformers saved.
    """
    space = "log_gpt"
    for number in itertools.count(2):
        if not hasattr(getattr(torch.ops, space), name):
            break
        space = f"log_gpt_{number}"

    def define(function: F) -> Any:
        not_compiled = disable(function)

        def kernel(*args: Any) -> Any:
            return (not_compiled if "torch._dynamo" in sys.modules else function)(*args)

        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(f"{space}::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(f"{space}::{name}", "default", kernel)
        return getattr(getattr(torch.ops, space), name).default

    return define


def assume_constant_result(function: F) -> F:
    """Do what torch.compiler.assume_constant_result does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def disable(function: F) -> F:
    """Do what torch.compiler.disable does; torch._dynamo is imported at the first call."""
    return _disable_dynamo(function)  # type: ignore[return-value]


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the type of autocast's matrix products; no-op without autocast, or in float64."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """The type of sums and states: float32, or float64 for float64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)


def refuse_transforms(operator: str, instead: str, *tensors: Tensor | None) -> None:
    """Raise if a tensor has a forward-mode tangent or is differentiated by torch.func.

    Call this before the operator.

    Args:
        operator: name for the message.
        instead: the form that supports all derivatives.

    Raises:
        NotImplementedError: one line.
    """
    if torch.compiler.is_compiling():
        return
    if any(_is_transformed(x) for x in tensors if x is not None):
        raise NotImplementedError(
            f"{operator} has no forward-mode derivatives and none by torch.func: "
            f"use {instead} for these"
        )


def refuse_second_order(operator: str, instead: str) -> None:
    """Raise if the gradients must have a graph (create_graph=True).

    Call this in the backward pass.

    Raises:
        NotImplementedError: one line.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{operator} has no second derivatives (create_graph=True): use {instead} for these"
        )


def _is_transformed(x: Tensor) -> bool:
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_gradtrackingtensor(x):  # in grad, vjp or jvp
            return True
        x = _functorch.get_unwrapped(x)  # vmap has no derivatives
    return forward_ad.unpack_dual(x).tangent is not None


def running_sum(x: Tensor, dim: int) -> Tensor:
    """torch.cumsum; log2(length) additions where deterministic algorithms refuse it, on GPUs."""
    if x.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(dim)
    length = x.shape[dim]
    step = 1
    while step < length:
        first = x.narrow(dim, 0, step)
        rest = x.narrow(dim, step, length - step) + x.narrow(dim, 0, length - step)
        x = torch.cat([first, rest], dim)
        step *= 2
    return x


def aligned(x: Tensor, n: int) -> Tensor:
    """Append zeros to x (..., D) up to the first multiple of 8 that is at least n, as torch's fused
    kernels need it."""
    size = 8 * ceil_div(n, 8)
    return pad(x, (0, size - x.shape[-1]))
