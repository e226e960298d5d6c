"""log_recurrence beside the published form: errors in float32 over length, and time at 1,024 tokens."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import logsigmoid

from common.console import console, say
from model.ops.log_recurrence import log_recurrence

TIMED_SHAPE = (1, 1024, 768)  # B, T and D of the published model
FEATURES = 4  # of the long sequences
Row = dict[str, Any]


def bench(lengths: list[int], logit: float, rounds: int) -> Row:
    """Measure and print.

    Args:
        logit: mean of p's logits.
        rounds: timed runs of each form.
    """
    errors = [errors_at(T, logit) for T in lengths]
    console.print(error_table(errors))
    times = times_of(logit, rounds)
    ratio = times["published"] / times["ours"]
    spent = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items())
    say(f"forward and backward, (B, T, D) = {TIMED_SHAPE}, medians: {spent}; ours is {ratio:.2f} x as fast")
    return {"errors": errors, "seconds": times}


def published(log_p: Tensor, h: Tensor, state: Tensor) -> Tensor:
    """The published code's form, from a state (B, D): sums over the whole sequence, whose rounding grows with it."""
    A = log_p.cumsum(1)
    return A + torch.cat([state.unsqueeze(1), h - A], 1).logcumsumexp(1)[:, 1:]


def ours(log_p: Tensor, h: Tensor, state: Tensor) -> Tensor:
    """`log_recurrence`, with a state like the other."""
    s = log_recurrence(log_p, h, state=state)
    assert isinstance(s, Tensor)
    return s


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"ours": ours, "published": published}


def draw_inputs(shape: tuple[int, int, int], logit: float) -> tuple[list[Tensor], Tensor]:
    """log_p = logsigmoid(N(logit, 1)), h and state N(0, 1), which want gradients; and the gradient of s."""
    generator = torch.Generator().manual_seed(0)
    B, _, D = shape
    p, h, weights, state = (torch.randn(size, generator=generator) for size in (shape, shape, shape, (B, D)))
    return [x.requires_grad_() for x in (logsigmoid(p + logit), h, state)], weights


def outputs(recurrence: Callable[..., Tensor], leaves: list[Tensor], weights: Tensor) -> list[Tensor]:
    """s and the gradients of log_p, h and state."""
    s = recurrence(*leaves)
    return [s.detach(), *torch.autograd.grad(s, leaves, weights)]


def errors_at(T: int, logit: float) -> Row:
    """Of each form at T tokens: the largest error of s, and of the gradients relative to the largest."""
    leaves, weights = draw_inputs((1, T, FEATURES), logit)
    wanted = outputs(ours, [x.detach().double().requires_grad_() for x in leaves], weights.double())
    row: Row = {"T": T}
    for name, form in FORMS.items():
        off = torch.stack([(a - b).abs().max() for a, b in zip(outputs(form, leaves, weights), wanted, strict=True)])
        largest_gradient = max(x.abs().max() for x in wanted[1:])
        row[name] = {"s": off[0].item(), "gradients": (off[1:].max() / largest_gradient).item()}
    return row


def times_of(logit: float, rounds: int) -> dict[str, float]:
    """Median seconds of forward and backward of each form, the forms in turns of random order."""
    leaves, weights = draw_inputs(TIMED_SHAPE, logit)
    seconds: dict[str, list[float]] = {name: [] for name in FORMS}
    for number in range(rounds + 3):
        for name in random.sample(list(FORMS), len(FORMS)):
            started = time.perf_counter()
            outputs(FORMS[name], leaves, weights)
            if number >= 3:  # the first ones allocate
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(found) for name, found in seconds.items()}


def error_table(rows: list[Row]) -> Table:
    """Errors over length, ours beside the published."""
    table = Table(title="log recurrence in float32: largest error against float64; of gradients: x the largest")
    for column in ("tokens", "ours: s", "gradients", "published: s", "gradients"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(f"{row['T']:,}", *(f"{row[name][key]:.1e}" for name in FORMS for key in ("s", "gradients")))
    return table
