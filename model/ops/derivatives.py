"""Refusals of the derivatives that operators with a backward pass of their own lack: torch can take them to be zero.

A custom operator of torch's drops forward-mode tangents, and a backward pass whose result has no graph makes gradients
constants to a second derivative. Neither gives an error.
"""

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad


def refuse_transforms(operator: str, instead: str, *tensors: Tensor) -> None:
    """Call before the operator: raise if a tensor has a forward-mode tangent or is differentiated by torch.func.

    Args:
        operator: what was called.
        instead: the form that autograd differentiates in every way.

    Raises:
        NotImplementedError: one line.
    """
    if not torch.compiler.is_compiling() and any(_is_transformed(x) for x in tensors):
        raise NotImplementedError(
            f"{operator} has no forward-mode derivatives and none by torch.func: use {instead} for these"
        )


def refuse_second_order(operator: str, instead: str) -> None:
    """Call in the backward pass, whose result has no graph: raise if one is wanted (create_graph=True).

    Raises:
        NotImplementedError: one line.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{operator} has no second derivatives (create_graph=True): use {instead} for these")


def _is_transformed(x: Tensor) -> bool:
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_gradtrackingtensor(x):  # of grad, vjp and jvp
            return True
        x = _functorch.get_unwrapped(x)  # vmap has no derivatives
    return forward_ad.unpack_dual(x).tangent is not None
