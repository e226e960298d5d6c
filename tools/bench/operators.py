"""Errors and times of operators, forward and backward."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from tools.bench.harness import in_turn

Operator = Callable[..., Any]
"""Tensors -> a tensor."""


def outputs(operator: Operator, leaves: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """The result, and the gradient of every leaf where that of the result is `weights`."""
    y = operator(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, weights)]


def exact_outputs(definition: Operator, leaves: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """The same in float64."""
    return outputs(definition, [x.detach().double().requires_grad_() for x in leaves], weights.double())


def largest_errors(got: list[Tensor], exact: list[Tensor]) -> tuple[float, float]:
    """Largest error of the result, and of the gradients relative to the largest of them; NaN where one is."""
    off = torch.stack([(a.double() - b).abs().max() for a, b in zip(got, exact, strict=True)])
    largest_gradient = max(x.abs().max() for x in exact[1:])
    return off[0].item(), (off[1:].max() / largest_gradient).item()


def passes_of(operator: Operator, leaves: Sequence[Tensor], weights: Tensor) -> dict[str, Callable[[], Any]]:
    """What is timed: a forward pass that keeps nothing for a backward pass, and both passes."""
    return {
        "forward": torch.no_grad()(partial(operator, *leaves)),
        "both": partial(outputs, operator, leaves, weights),
    }


def time_passes(
    contenders: Mapping[str, Mapping[str, Callable[[], Any]]], rounds: int, seconds: float = 0.0
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each pass of each contender in every round.

    Each turn begins with a pass that is not timed and then lasts `seconds` or one pass, whichever is longer: what the
    other contenders leave in caches and in the allocator is not charged to this one.
    """
    timers = {
        (name, key): Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        for name, passes in contenders.items()
        for key, run in passes.items()
    }
    turns = {key: partial(timer.blocked_autorange, min_run_time=seconds) for key, timer in timers.items()}
    measured = in_turn(turns, rounds)
    return {
        name: {key: [turn.median for turn in measured[name, key]] for key in passes}
        for name, passes in contenders.items()
    }
