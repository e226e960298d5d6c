"""Sparse attention beside dense causal attention by torch's fused kernel: forward and backward, by length."""

from functools import partial
from typing import Any

from torch.nn.functional import scaled_dot_product_attention

from common.settings import UserError
from model.ops.sparse_attention import naive_sparse_attention, sparse_attention
from model.ops.sparse_attention.patterns import Pattern, fixed, longformer, strided, window
from tools.bench.harness import Row, benchmark, speedup
from tools.bench.operators import Operator, attention_inputs, device_named, errors_of, medians, time_passes

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


@benchmark("medians over the rounds, and the range of the ratios")
def bench(options: Any) -> Row:
    """Check every pattern, then measure all of them at each length."""
    device = device_named(options.device).type
    contenders: dict[str, Operator] = {DENSE: partial(scaled_dot_product_attention, is_causal=True)}
    for name, patterns in PATTERNS.items():
        heads = [patterns[h % len(patterns)] for h in range(options.heads)] if len(patterns) > 1 else patterns
        contenders[name] = partial(sparse_attention, patterns=heads)
        check(name, contenders[name], partial(naive_sparse_attention, patterns=heads), options.heads, device)
    rows: list[Row] = []
    for T in options.lengths:
        times = time_passes(contenders, *attention_inputs((1, options.heads, T, FEATURES), device), options.rounds)
        for name, found in times.items():
            ratio, low, high = speedup(found["both"], times[DENSE]["both"])
            faster = {"x_dense": ratio, "least": low, "most": high}
            rows.append({"contender": name, "T": T, **medians(found), **faster})
    return {"rows": rows}


def check(name: str, attend: Operator, definition: Operator, n_head: int, device: str) -> None:
    """Compare a contender with its definition.

    Raises:
        UserError: a result or a gradient is wrong.
    """
    inputs = attention_inputs((1, n_head, CHECKED, FEATURES), device)
    for error in errors_of(attend, definition, *inputs):
        if not error <= ALLOWED:  # NaN is wrong too
            raise UserError(f"{name} differs from its definition by {error:.1e}, and {ALLOWED:.0e} is allowed")
