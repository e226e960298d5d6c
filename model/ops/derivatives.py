"""Errors for derivatives that operators with their own backward pass do not have, and that torch would take to be zero.

torch's custom operators drop forward-mode tangents, and the result of a backward pass without a graph is constant for
second derivatives. In neither case does torch raise an error.
"""

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad


def refuse_transforms(operator: str, instead: str, *tensors: Tensor | None) -> None:
    """Raise if a tensor has a forward-mode tangent or is differentiated by torch.func. Call it before the operator.

    Args:
        operator: name for the message.
        instead: the form that supports all derivatives.

    Raises:
        NotImplementedError: one line.
    """
    if not torch.compiler.is_compiling() and any(_is_transformed(x) for x in tensors if x is not None):
        raise NotImplementedError(
            f"{operator} has no forward-mode derivatives and none by torch.func: use {instead} for these"
        )


def refuse_second_order(operator: str, instead: str) -> None:
    """Raise if the gradients must have a graph (create_graph=True). Call it in the backward pass.

    Raises:
        NotImplementedError: one line.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{operator} has no second derivatives (create_graph=True): use {instead} for these")


def _is_transformed(x: Tensor) -> bool:
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_gradtrackingtensor(x):  # in grad, vjp or jvp
            return True
        x = _functorch.get_unwrapped(x)  # vmap has no derivatives
    return forward_ad.unpack_dual(x).tangent is not None
