"""log_recurrence beside the published form: errors in float32 over length, and time at 1,024 tokens."""

import statistics
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from common.console import say, show_table
from common.files import make_directory
from model.ops.log_recurrence import log_recurrence
from tools.bench.harness import Row, speedup, table_of, write_results
from tools.bench.operators import Operator, exact_outputs, largest_errors, outputs, passes_of, time_passes

TIMED_SHAPE = (1, 1024, 768)  # B, T and D of the published model
FEATURES = 4  # of the long sequences


def bench(options: Any) -> None:
    """Measure, print a table, write bench.json."""
    out, logit = make_directory(options.out, "out"), options.logit
    errors = [errors_at(T, logit) for T in options.lengths]
    title = "log recurrence in float32: largest error against float64; of gradients: x the largest"
    cells = [[f"{row[name][key]:.1e}" for name in FORMS for key in ("s", "gradients")] for row in errors]
    columns = ["tokens", "ours: s", "gradients", "published: s", "gradients"]
    show_table(table_of(title, columns, ([f"{T:,}", *row] for T, row in zip(options.lengths, cells, strict=True))))
    leaves, weights = draw_inputs(TIMED_SHAPE, logit)
    times = time_passes({name: passes_of(form, leaves, weights) for name, form in FORMS.items()}, options.rounds)
    seconds = {name: statistics.median(found["both"]) for name, found in times.items()}
    ratio, *_ = speedup(times["ours"]["both"], times["published"]["both"])
    spent = ", ".join(f"{name} {1e3 * median:.2f} ms" for name, median in seconds.items())
    say(f"forward and backward, (B, T, D) = {TIMED_SHAPE}, medians: {spent}; ours is {ratio:.2f} x as fast")
    write_results(out, options, {"errors": errors, "seconds": seconds})


def published(log_p: Tensor, h: Tensor, state: Tensor) -> Tensor:
    """The published code's form, from a state (B, D): sums over the whole sequence, whose rounding grows with it."""
    A = log_p.cumsum(1)
    return A + torch.cat([state.unsqueeze(1), h - A], 1).logcumsumexp(1)[:, 1:]


FORMS: dict[str, Operator] = {
    "ours": lambda log_p, h, state: log_recurrence(log_p, h, state=state),
    "published": published,
}


def draw_inputs(shape: tuple[int, int, int], logit: float) -> tuple[list[Tensor], Tensor]:
    """log_p = logsigmoid(N(logit, 1)), h and state N(0, 1), which require gradients; and the gradient of s."""
    generator = torch.Generator().manual_seed(0)
    B, _, D = shape
    p, h, weights, state = (torch.randn(size, generator=generator) for size in (shape, shape, shape, (B, D)))
    return [x.requires_grad_() for x in (logsigmoid(p + logit), h, state)], weights


def errors_at(T: int, logit: float) -> Row:
    """Largest errors of each form at T tokens."""
    leaves, weights = draw_inputs((1, T, FEATURES), logit)
    exact = exact_outputs(FORMS["ours"], leaves, weights)
    errors = {name: largest_errors(outputs(form, leaves, weights), exact) for name, form in FORMS.items()}
    return {"T": T} | {name: {"s": s, "gradients": gradients} for name, (s, gradients) in errors.items()}
