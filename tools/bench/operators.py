"""Errors and times of operators, forward and backward."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from common.settings import UserError
from tools.bench.harness import Row, in_turn

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""The type in which attention is timed, by device."""

Operator = Callable[..., Any]
"""Tensors -> a tensor."""


def device_named(name: str) -> torch.device:
    """The device of an option `device`: auto, cpu or cuda; auto is a GPU if there is one.

    Raises:
        UserError: there is no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but torch sees no GPU here: use device=cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def attention_inputs(
    shape: Sequence[int], device: str = "cpu", dtype: torch.dtype = torch.float32, deviation: float = 1.0
) -> tuple[list[Tensor], Tensor]:
    """Random q, k and v, which require gradients, and the gradient of the result, all (B, H, T, D)."""
    options: Any = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": dtype}
    leaves = [(deviation * torch.randn(shape, **options)).requires_grad_() for _ in range(3)]
    return leaves, torch.randn(shape, **options)


def outputs(operator: Operator, leaves: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """The result, and the gradient of every leaf, given `weights` as the gradient of the result."""
    y = operator(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, weights)]


def errors_of(
    operator: Operator, definition: Operator, leaves: Sequence[Tensor], weights: Tensor
) -> tuple[float, float]:
    """Largest errors of the result, and of gradients relative to the largest one, against the definition in float64.

    An error is NaN if a result or a gradient contains NaN.
    """
    exact = outputs(definition, [x.detach().double().requires_grad_() for x in leaves], weights.double())
    got = outputs(operator, leaves, weights)
    off = torch.stack([(a.double() - b).abs().max() for a, b in zip(got, exact, strict=True)])
    return off[0].item(), (off[1:].max() / max(x.abs().max() for x in exact[1:])).item()


def time_passes(
    operators: Mapping[str, Operator], leaves: Sequence[Tensor], weights: Tensor, rounds: int, seconds: float = 0.0
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each operator's passes in every round: "forward", which keeps nothing, and "both" passes.

    Each turn begins with an untimed pass and then lasts `seconds` or one pass, whichever is longer: what the other
    operators leave in caches and in the allocator does not count for this one.
    """
    turns = {}
    for name, operator in operators.items():
        forward, both = torch.no_grad()(partial(operator, *leaves)), partial(outputs, operator, leaves, weights)
        for key, run in (("forward", forward), ("both", both)):
            timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
            turns[name, key] = partial(timer.blocked_autorange, min_run_time=seconds)
    times: dict[str, dict[str, list[float]]] = {name: {} for name in operators}
    for (name, key), measurements in in_turn(turns, rounds).items():
        times[name][key] = [1e3 * measured.median for measured in measurements]
    return times


def medians(times: Mapping[str, list[float]]) -> Row:
    """The median of each pass, as forward_ms and both_ms."""
    return {f"{key}_ms": statistics.median(found) for key, found in times.items()}
