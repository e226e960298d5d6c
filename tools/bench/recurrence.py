"""log_recurrence beside the published form: errors in float32 over length, and time at 1,024 tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from common.console import say
from model.ops.log_recurrence import log_recurrence
from tools.bench.harness import Row, benchmark, speedup
from tools.bench.operators import Operator, device_named, errors_of, medians, time_passes

TIMED_SHAPE = (1, 1024, 768)  # B, T and D of the published model
FEATURES = 4  # of the long sequences


@benchmark("log recurrence in float32: largest error against float64; of gradients: x the largest")
def bench(options: Any) -> Row:
    """Measure errors at every length, and the time at one."""
    device = device_named(options.device)
    times = time_passes(FORMS, *draw_inputs(TIMED_SHAPE, options.logit, device), options.rounds)
    both = {name: medians(found)["both_ms"] for name, found in times.items()}
    ratio, *_ = speedup(times["ours"]["both"], times["published"]["both"])
    spent = ", ".join(f"{name} {ms:.2f} ms" for name, ms in both.items())
    say(f"forward and backward, (B, T, D) = {TIMED_SHAPE}, medians: {spent}; ours is {ratio:.2f} x as fast")
    return {"rows": [errors_at(T, options.logit, device) for T in options.lengths], "both_ms": both}


def published(log_p: Tensor, h: Tensor, state: Tensor) -> Tensor:
    """The published form, from a state (B, D): it sums over the whole sequence, so its rounding error grows with T."""
    A = log_p.cumsum(1)
    return A + torch.cat([state.unsqueeze(1), h - A], 1).logcumsumexp(1)[:, 1:]


FORMS: dict[str, Operator] = {
    "ours": lambda log_p, h, state: log_recurrence(log_p, h, state=state),
    "published": published,
}


def draw_inputs(shape: tuple[int, int, int], logit: float, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """log_p = logsigmoid(N(logit, 1)), h and state N(0, 1), which require gradients; and the gradient of s."""
    generator = torch.Generator().manual_seed(0)
    B, _, D = shape
    p, h, weights, state = (torch.randn(size, generator=generator).to(device) for size in (shape, shape, shape, (B, D)))
    return [x.requires_grad_() for x in (logsigmoid(p + logit), h, state)], weights


def errors_at(T: int, logit: float, device: torch.device) -> Row:
    """Largest errors of each form at T tokens."""
    leaves, weights = draw_inputs((1, T, FEATURES), logit, device)
    row: Row = {"tokens": T}
    for name, form in FORMS.items():
        row[f"{name}_s"], row[f"{name}_gradients"] = errors_of(form, FORMS["ours"], leaves, weights)
    return row
