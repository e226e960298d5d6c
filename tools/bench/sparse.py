"""Sparse attention beside dense causal attention by torch's fused kernel: forward and backward, by length."""

import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common.console import show_table
from common.files import make_directory
from common.settings import UserError
from model.ops.sparse_attention import naive_sparse_attention, sparse_attention
from model.ops.sparse_attention.patterns import Pattern, fixed, longformer, strided, window
from tools.bench.harness import Row, speedup, table_of, write_results
from tools.bench.operators import Operator, exact_outputs, largest_errors, outputs, passes_of, time_passes

DENSE = "dense SDPA"
PATTERNS: dict[str, list[Pattern]] = {
    "window 256": [window(256)],
    "window 256, dilation 1": [window(256, 1)],
    "longformer 256 + 16": [longformer(256, 16)],
    "strided 128, alternating": [strided(128, "A1"), strided(128, "A2")],
    "strided 128, merged": [strided(128)],
    "fixed 128 / 8, alternating": [fixed(128, 8, "A1"), fixed(128, 8, "A2")],
    "fixed 128 / 8, merged": [fixed(128, 8)],
}
FEATURES = 64
CHECKED = 700  # tokens of the comparison with the definition
ALLOWED = 1e-4  # rounding of float32: sums of 700 terms differ by about 700 x 2^-24 of them


def bench(options: Any) -> None:
    """Check, measure, print a table, write bench.json."""
    check(options.heads)
    out = make_directory(options.out, "out")
    cells, rows = [], []
    for T in options.lengths:
        cells.append([f"[bold]T={T:,}[/]"])
        for row in measure(T, options.heads, options.rounds):
            low, high = row["over_dense_range"]
            times = [f"{row[key]:,.1f}" for key in ("forward_ms", "both_ms")]
            cells.append([row["contender"], *times, f"{row['over_dense']:.2f}", f"{low:.2f} to {high:.2f}"])
            rows.append(row)
    columns = ["attention", "forward ms", "forward + backward ms", "x as fast as dense", "range"]
    show_table(table_of("Medians over the rounds; the ratio's range over them", columns, cells))
    write_results(out, options, {"rows": rows})


def of_heads(patterns: list[Pattern], n_head: int) -> list[Pattern]:
    """A pattern per head, in turn; or one, if all heads have the same."""
    return [patterns[h % len(patterns)] for h in range(n_head)] if len(patterns) > 1 else patterns


def inputs(T: int, n_head: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the gradient of the result, all (1, H, T, D)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, weights = (torch.randn(1, n_head, T, FEATURES, generator=generator) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], weights


def check(n_head: int) -> None:
    """Compare every contender with its definition.

    Raises:
        UserError: a result or a gradient is wrong.
    """
    leaves, weights = inputs(CHECKED, n_head)
    for name, patterns in PATTERNS.items():
        heads = of_heads(patterns, n_head)
        exact = exact_outputs(partial(naive_sparse_attention, patterns=heads), leaves, weights)
        got = outputs(partial(sparse_attention, patterns=heads), leaves, weights)
        for error in largest_errors(got, exact):
            if not error <= ALLOWED:  # NaN is wrong too
                raise UserError(f"{name} differs from its definition by {error:.1e}, and {ALLOWED:.0e} is allowed")


def measure(T: int, n_head: int, rounds: int) -> list[Row]:
    """One row for each contender at this length."""
    contenders: dict[str, Operator] = {DENSE: partial(scaled_dot_product_attention, is_causal=True)}
    for name, patterns in PATTERNS.items():
        contenders[name] = partial(sparse_attention, patterns=of_heads(patterns, n_head))
    qkv, weights = inputs(T, n_head)
    times = time_passes({name: passes_of(attend, qkv, weights) for name, attend in contenders.items()}, rounds)
    rows = []
    for name, found in times.items():
        ratio, *ends = speedup(found["both"], times[DENSE]["both"])
        medians = {f"{key}_ms": 1e3 * statistics.median(seconds) for key, seconds in found.items()}
        rows.append({"contender": name, "T": T, **medians, "over_dense": ratio, "over_dense_range": ends})
    return rows
