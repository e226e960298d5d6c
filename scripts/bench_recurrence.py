"""Compare log_recurrence with the published form: errors in float32 over length, and time at 1,024 tokens.

    python scripts/bench_recurrence.py                # 1,024 to 1,048,576 tokens
    python scripts/bench_recurrence.py --logit 10     # p = 0.99995: a memory of some 20,000 tokens

The truth is log_recurrence in float64, which tests hold to the definition.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import logsigmoid

from common.command import parser_of, run_script
from common.console import console, say
from common.files import make_directory, write_json
from model.ops.log_recurrence import log_recurrence

TIMED_SHAPE = (1, 1024, 768)  # B, T and D of the published model
FEATURES = 4  # of the long sequences
Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and measure."""
    return run_script(parser(), bench, argv)


def bench(options: argparse.Namespace) -> None:
    """Measure, print two tables, write bench.json."""
    out = make_directory(options.out, "--out")
    errors = [errors_at(T, options.logit) for T in options.lengths]
    console.print(error_table(errors))
    times = times_of(options.logit, options.rounds)
    ratio = times["published"] / times["ours"]
    spent = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items())
    say(f"forward and backward, (B, T, D) = {TIMED_SHAPE}, medians: {spent}; ours is {ratio:.2f} x as fast")
    found = {"options": {k: str(v) for k, v in vars(options).items()}, "errors": errors, "seconds": times}
    write_json(out / "bench.json", found)
    say(f"written to {out / 'bench.json'}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    known = parser_of(__doc__)
    known.add_argument("--lengths", nargs="+", type=int, default=[2**10, 2**14, 2**17, 2**20], help="tokens")
    known.add_argument("--logit", type=float, default=0.0, help="mean of p's logits; the larger, the longer it keeps")
    known.add_argument("--rounds", type=int, default=200, help="timed runs of each form")
    known.add_argument("--out", type=Path, default=Path("runs/bench_recurrence"))
    return known


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


if __name__ == "__main__":
    sys.exit(main())
