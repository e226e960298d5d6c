"""Times attention, forward and backward."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, scaled_dot_product_attention
from torch.utils.benchmark import Timer

from common.console import say
from common.settings import JsonDict
from model.ops.log_attention import LINEAR, log_attention
from model.ops.sparse_attention.attend import sparse_attention
from model.ops.sparse_attention.patterns import fixed, longformer, strided, window
from runtime.launch import free_memory
from tools.bench.measuring import call_in_turn

PATTERNS = {
    "window 256": window(256),
    "longformer 256 + 16": longformer(256, 16),
    "strided 128": strided(128),
    "fixed 128 / 8": fixed(128, 8),
}

Operator = Callable[..., Any]
"""Tensors -> a tensor."""


def measure_operators(options: Any) -> list[JsonDict]:
    """Time every attention at each length, torch's softmax first."""
    rows = []
    for T in options.lengths:
        shape = (options.batch, options.heads, T, options.head_dim)
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        generator = torch.Generator(options.device).manual_seed(0)
        like = {"device": options.device, "dtype": dtype}
        *leaves, weights = torch.randn(4, *shape, generator=generator, **like)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        operators = list_operators()
        free = torch.cuda.mem_get_info()[0] if options.device == "cuda" else free_memory()
        for name in list(operators):
            needed = estimate_bytes(name, shape, options.device)
            if needed > free / 2:
                say(f"skipped at {T} tokens: {name}, it takes about {needed / 1e9:.2g} GB")
                del operators[name]
        for name, row in time_operators(operators, leaves, weights, options).items():
            rows.append({"operator": name, "T": T} | row)
    return rows


def list_operators() -> dict[str, Operator]:
    """Return every attention by name, as a function of q, k and v, or log_v."""
    operators: dict[str, Operator] = {
        "SDPA": partial(scaled_dot_product_attention, is_causal=True),
        "published": attend_as_published,
        "log attention": log_attention,
        "log attention, gates": lambda q, k, v: log_attention(q, k, v, logsigmoid(k[..., :1] + 4)),
        "linear attention": partial(log_attention, form=LINEAR),
    }
    for name, pattern in PATTERNS.items():
        operators[name] = partial(sparse_attention, patterns=[pattern])
    return operators


def attend_as_published(q: Tensor, k: Tensor, log_v: Tensor) -> Tensor:
    """Heinsen 2024 (arXiv 2404.05843), eqs. 4-6, with all T x d_k x d_v latent sums in memory."""
    log_s = (k.unsqueeze(-1) + log_v.unsqueeze(-2)).logcumsumexp(2)  # (B, H, T, d_k, d_v)
    log_z = k.logcumsumexp(2)
    return (q.unsqueeze(-1) + log_s).logsumexp(-2) - (q + log_z).logsumexp(-1, keepdim=True)


def estimate_bytes(operator: str, shape: Sequence[int], device: str) -> float:
    """Estimate an operator's memory, if that grows faster than its inputs; otherwise 0."""
    B, H, T, D = shape
    if operator == "published":
        return 12 * 4 * B * H * T * D * D  # its backward pass keeps 12 times the latents
    if operator in PATTERNS and device == "cpu":
        return 4 * 4 * B * H * T * T  # and masks keep 4 times the scores
    return 0


def time_operators(
    operators: dict[str, Operator], leaves: Sequence[Tensor], weights: Tensor, options: Any
) -> dict[str, JsonDict]:
    """Return median milliseconds of each operator, and its speed relative to the first one.

    "forward" is without gradients, "both" with a backward pass. Each turn starts with an untimed
    pass, so caches and allocations of other operators do not affect the timing.
    """

    def both_passes(run: Operator) -> None:
        torch.autograd.grad(run(*leaves), leaves, weights)

    # This compiles, if need be.
    call_in_turn({name: partial(both_passes, run) for name, run in operators.items()}, 1)
    turns = {}
    for name, run in operators.items():
        works = {
            "forward": torch.no_grad()(partial(run, *leaves)),
            "both": partial(both_passes, run),
        }
        for key, work in works.items():
            timer = Timer("run()", globals={"run": work}, num_threads=torch.get_num_threads())
            turns[name, key] = partial(timer.blocked_autorange, min_run_time=options.seconds)
    # Medians, and how they compare with the first operator.
    rows: dict[str, JsonDict] = {}
    for (name, key), measurements in call_in_turn(turns, options.rounds).items():
        median = statistics.median(measurement.median for measurement in measurements)
        rows.setdefault(name, {})[f"{key}_ms"] = 1e3 * median
    first = next(iter(rows.values()))
    for row in rows.values():
        row["forward_x"] = first["forward_ms"] / row["forward_ms"]
        row["both_x"] = first["both_ms"] / row["both_ms"]
    return rows
