"""Times attention, forward and backward, also by launch parameters. Models call the same
functions."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, scaled_dot_product_attention
from torch.utils.benchmark import Timer

from common.console import say
from common.settings import UserError
from model.ops.kernels import why_not_triton
from model.ops.log_attention import log_attention, naive_log_attention
from model.ops.sparse_attention.attend import sparse_attention
from model.ops.sparse_attention.patterns import fixed, longformer, strided, window
from tools.bench.harness import Row, attempt, in_turn, profiled

# The published formula keeps several times its T x d_k x d_v latents: with more it is skipped.
LATENT_BYTES = 2e9
PATTERNS = {
    "window 256": [window(256)],
    "longformer 256 + 16": [longformer(256, 16)],
    "strided 128": [strided(128, "A1"), strided(128, "A2")],
    "fixed 128 / 8": [fixed(128, 8, "A1"), fixed(128, 8, "A2")],
}

Operator = Callable[..., Any]
"""Tensors -> a tensor."""


def measure(options: Any) -> dict[str, list[Row]]:
    """Time every attention at each length, torch's softmax first."""
    device, n_head, d = options.device, options.heads, options.head_dim
    rows, profiles = [], {}
    for T in options.lengths:
        inputs = random_inputs((options.batch, n_head, T, d), device)
        latents, operators = 4 * d * inputs[1].numel(), attention(device, n_head)
        if latents > LATENT_BYTES:
            say(f"skipped at {T} tokens: published, its latents alone take {latents / 1e9:.1f} GB")
            operators.pop("published")
        rows += [
            {"operator": name, "T": T} | row
            for name, row in times_of(operators, *inputs, options).items()
        ]
        if options.profile:
            profiles[f"log attention, {T} tokens"] = profiled(
                partial(outputs, log_attention, *inputs)
            )
    return {"operators": rows, **profiles}


def attention(device: str, n_head: int) -> dict[str, Operator]:
    """Return every attention by name, as a function of q, k and v, or log_v."""
    found: dict[str, Operator] = {
        "SDPA": partial(scaled_dot_product_attention, is_causal=True),
        "published": naive_log_attention,
        "log attention": log_attention,
        "log attention, gates": lambda q, k, log_v: log_attention(
            q, k, log_v, logsigmoid(k[..., :1] + 4)
        ),
    }
    if device == "cuda":
        found["log attention, chunked"] = partial(log_attention, backend="chunked")
    for name, patterns in PATTERNS.items():  # of two kinds, heads take turns
        by_head = (n_head * patterns)[:n_head] if len(patterns) > 1 else patterns
        found[name] = partial(sparse_attention, patterns=by_head)
    return found


def random_inputs(shape: Sequence[int], device: str) -> tuple[list[Tensor], Tensor]:
    """Three leaves, such as q, k and v, which require gradients, and the gradient of the result."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    options: Any = {
        "generator": torch.Generator(device).manual_seed(0),
        "device": device,
        "dtype": dtype,
    }
    return [torch.randn(shape, **options).requires_grad_() for _ in range(3)], torch.randn(
        shape, **options
    )


def outputs(operator: Operator, leaves: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """The result, and the gradient of every leaf, given `weights` as the gradient of the result."""
    y = operator(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, weights)]


def times_of(
    operators: dict[str, Operator], leaves: Sequence[Tensor], weights: Tensor, options: Any
) -> dict[str, Row]:
    """Median milliseconds of each operator: forward without gradients, and forward plus backward,
    with ratios.

    Each turn starts with an untimed pass, so caches and allocations of other operators do not
    affect the timing.
    """
    turns = {}
    for name, run in operators.items():
        both = partial(outputs, run, leaves, weights)
        if (
            attempt(f"{name}, {leaves[0].shape[-2]:,} tokens", both) is None
        ):  # it compiles and tunes, if need be
            continue
        for key, work in (("forward", torch.no_grad()(partial(run, *leaves))), ("both", both)):
            timer = Timer("run()", globals={"run": work}, num_threads=torch.get_num_threads())
            turns[name, key] = partial(timer.blocked_autorange, min_run_time=options.seconds)
    rows: dict[str, Row] = {}
    for (name, key), found in in_turn(turns, options.rounds).items():
        rows.setdefault(name, {})[f"{key}_ms"] = 1e3 * statistics.median(
            one.median for one in found
        )
    for row in rows.values():
        first = next(iter(rows.values()))
        row |= {f"{key}_x": first[f"{key}_ms"] / row[f"{key}_ms"] for key in ("forward", "both")}
    return rows


def measure_tuning(options: Any) -> dict[str, list[Row]]:
    """Time log attention with float32 gates, first as it is used, then for all combinations of
    parameters."""
    if reason := why_not_triton(options.device, None):
        raise UserError(f"what=tuning: backend='triton' {reason}")
    from model.ops.log_attention import (
        triton as kernels,
    )  # importing triton is slow, and it may be missing

    shape = options.batch, options.heads, options.lengths[0], options.head_dim
    leaves, weights = random_inputs(shape, options.device)

    def run(parameters: dict[str, int], q: Tensor, k: Tensor, log_v: Tensor) -> Tensor:
        kernels.trial.clear()
        kernels.trial.update(parameters)  # the backward pass needs them, too
        log_f = logsigmoid(k[..., :1].float() + 4)
        return log_attention(q, k, log_v, log_f, backend="triton")  # type: ignore[return-value]

    contenders: dict[str, Operator] = {"as used": partial(run, {})}
    for warps, stages, chunk in itertools.product((4, 8), (1, 2), (64, 32)):
        parameters = {"warps": warps, "stages": stages, "chunk": chunk}
        contenders[f"{warps} warps, {stages} stages, chunks of {chunk}"] = partial(run, parameters)
    try:
        rows = times_of(contenders, leaves, weights, options)
    finally:
        kernels.trial.clear()
    return {"tuning": [{"parameters": name} | row for name, row in rows.items()]}
