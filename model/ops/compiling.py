"""The decorators of torch.compiler, without their import of torch._dynamo: that takes two seconds, in every command."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._compile import _disable_dynamo

F = TypeVar("F", bound=Callable[..., Any])


def assume_constant_result(function: F) -> F:
    """Do what torch.compiler.assume_constant_result does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def disable(function: F) -> F:
    """Do what torch.compiler.disable does; torch._dynamo is imported at the first call."""
    return _disable_dynamo(function)  # type: ignore[return-value]
