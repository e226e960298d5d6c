"""Sparse attention beside dense causal attention by torch's fused kernel: forward and backward, by length."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common.commit import git_commit
from common.settings import UserError
from model.ops.sparse_attention import (
    Pattern,
    fixed,
    longformer,
    naive_sparse_attention,
    sparse_attention,
    strided,
    window,
)

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
ALLOWED = 1e-4  # float32, whose sums of 700 terms differ by some 700 x 2^-24 of them

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]


def of_heads(patterns: list[Pattern], n_head: int) -> list[Pattern]:
    """The patterns in turn; one, if all heads have the same."""
    return [patterns[h % len(patterns)] for h in range(n_head)] if len(patterns) > 1 else patterns


def contenders(n_head: int) -> dict[str, Attend]:
    """Dense attention first."""
    dense: Attend = partial(scaled_dot_product_attention, is_causal=True)
    return {DENSE: dense} | {
        name: partial(sparse_attention, patterns=of_heads(patterns, n_head)) for name, patterns in PATTERNS.items()
    }


def inputs(T: int, n_head: int) -> list[Tensor]:
    """q, k, v, (1, H, T, D)."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n_head, T, FEATURES, generator=generator).requires_grad_() for _ in range(3)]


def check(n_head: int) -> None:
    """Raise UserError where a result or a gradient is not the definition's."""
    q, k, v = qkv = inputs(CHECKED, n_head)
    for name, attend in contenders(n_head).items():
        if name == DENSE:
            continue
        wanted = naive_sparse_attention(q, k, v, of_heads(PATTERNS[name], n_head))
        found = attend(*qkv)
        g = torch.ones_like(found)
        pairs = [(found, wanted), *zip(_gradients(found, qkv, g), _gradients(wanted, qkv, g), strict=True)]
        error = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
        if not error <= ALLOWED:
            raise UserError(f"{name} differs from its definition by {error:.1e}, and {ALLOWED:.0e} is allowed")


def _gradients(y: Tensor, inputs: list[Tensor], g: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, inputs, g)


def measure(T: int, n_head: int, rounds: int) -> list[Row]:
    """One row for each contender at this length."""
    qkv, all_ = inputs(T, n_head), contenders(n_head)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in all_}
    for n in range(rounds + 1):
        for name, attend in all_.items():
            taken = _time(attend, qkv)
            if n:  # the first round makes masks and warms up
                seconds[name].append(taken)
    rows = []
    for name, times in seconds.items():
        ratios = [dense[1] / own[1] for dense, own in zip(seconds[DENSE], times, strict=True)]
        rows.append(
            {
                "contender": name,
                "T": T,
                "forward_ms": 1e3 * statistics.median(forward for forward, _ in times),
                "both_ms": 1e3 * statistics.median(both for _, both in times),
                "over_dense": statistics.median(ratios),
                "over_dense_range": [min(ratios), max(ratios)],
            }
        )
    return rows


def _time(attend: Attend, qkv: list[Tensor]) -> tuple[float, float]:
    """Seconds of a forward pass, and with its backward pass."""
    g = torch.ones_like(qkv[0])
    begin = time.perf_counter()
    y = attend(*qkv)
    middle = time.perf_counter()
    _gradients(y, qkv, g)
    return middle - begin, time.perf_counter() - begin


def table_of(rows: list[Row]) -> Table:
    """For people."""
    table = Table(title="Medians over the rounds; the ratio's range over them")
    for column in ("T", "attention", "forward ms", "forward + backward ms", "x as fast as dense", "range"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    for n, row in enumerate(rows):
        low, high = row["over_dense_range"]
        times = [f"{row[key]:,.1f}" for key in ("forward_ms", "both_ms")]
        ratios = [f"{row['over_dense']:.2f}", f"{low:.2f} to {high:.2f}"]
        last = n + 1 == len(rows) or rows[n + 1]["T"] != row["T"]
        table.add_row(f"{row['T']:,}", row["contender"], *times, *ratios, end_section=last)
    return table


def describe() -> Row:
    """What the figures depend on besides the command."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "device": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": load,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "git_commit": git_commit(),
    }
